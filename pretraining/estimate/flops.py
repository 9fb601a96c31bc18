"""Floating-point operations per token of training.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape
from pretraining.estimate.costs import block_costs


def matmul_parameters(shape: LlamaShape) -> int:
    """Return the parameters in matrix products: of the blocks, and of the head (D·V, tied or not).

    The embedding is a look-up and does not count.
    """
    return shape.num_hidden_layers * block_costs(shape).matmul_parameters + shape.hidden_size * shape.vocab_size


def flops_per_token(shape: LlamaShape, seq_length: float) -> float:
    """Return the floating-point operations per token of training: 6 x matmul parameters + 6·L·(H·E)·S.

    Matrices: 2 FLOPs per token and parameter, a multiplication and an addition. Backward adds twice as many, for the
    gradients of input and parameter: 2 + 4 = 6.

    Attention: the scores of a token against S keys cost 2·(H·E)·S, the mix of S values as much again. Forward and
    backward together are three times that, 12·(H·E)·S per layer. Causality halves it: a token sees S/2 on average.

    Recomputed activations, norms, rotations and softmax do not count. This is the numerator of MFU in PaLM (Chowdhery
    et al. 2022, appendix B), except that the attention term is not halved there.

    Args:
        shape: dimensions of the model.
        seq_length: S, tokens per sequence. Under a document mask: length of a token's document, averaged over tokens;
            the formula is linear in S.
    """
    attention = 6 * shape.num_hidden_layers * block_costs(shape).query_width * seq_length
    return 6 * matmul_parameters(shape) + attention


def recomputed_flops_per_token(shape: LlamaShape, share: float, seq_length: float) -> float:
    """Return the operations per token that activation checkpointing repeats: a share of the blocks' forward.

        forward of the blocks  =  2 x matmul parameters of the blocks  +  2·L·(H·E)·S

    The sum with `flops_per_token` is the numerator of HFU (Chowdhery et al. 2022, appendix B), which does not count the
    recomputation inside a flash kernel's backward. `seq_length` is as in `flops_per_token`.
    """
    block = block_costs(shape)
    matrices = 2 * shape.num_hidden_layers * block.matmul_parameters
    return share * (matrices + 2 * shape.num_hidden_layers * block.query_width * seq_length)


def recomputed_share(parallel: ParallelConfig, shape: LlamaShape, seq_length: float) -> float:
    """Return the share of the blocks' forward operations that backward repeats; 0 = none.

    A checkpointed block repeats all but its last matrix product, whose result backward does not need. `seq_length` is
    as in `flops_per_token`.
    """
    if not parallel.fsdp_activation_checkpointing or parallel.selective_checkpointing == PER_OPERATION:
        return 0.0
    blocks, block = checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers), block_costs(shape)
    forward = 2 * block.matmul_parameters + 2 * block.query_width * seq_length
    return len(blocks) / shape.num_hidden_layers * (1 - 2 * block.last_product / forward)
