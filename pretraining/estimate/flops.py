"""Floating-point operations per token of training.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape
from pretraining.estimate.costs import block_costs


def flops_per_token(shape: LlamaShape, seq_length: float) -> float:
    """Return the floating-point operations per token of training: 6 x matmul parameters + 6·L·(H·E)·S.

    Matrices: 2 FLOPs per token and parameter, a multiplication and an addition. Backward adds twice as many, for the
    gradients of input and parameter: 2 + 4 = 6. The head counts (D·V, tied or not); the embedding is a look-up and does
    not.

    Recomputed activations, norms, rotations and softmax do not count. This is the numerator of MFU in PaLM (Chowdhery
    et al. 2022, appendix B), except that the attention term is not halved there.

    Args:
        shape: dimensions of the model.
        seq_length: S, tokens per sequence. Under a document mask: length of a token's document, averaged over tokens;
            the formula is linear in S.
    """
    blocks = shape.num_hidden_layers * block_forward_flops(shape, seq_length)
    return 3 * (blocks + 2 * shape.hidden_size * shape.vocab_size)


def block_forward_flops(shape: LlamaShape, seq_length: float) -> float:
    """Return the operations per token of a block's forward: 2 x matmul parameters + 2·(H·E)·S.

    Attention: the scores of a token against S keys cost 2·(H·E)·S, the mix of S values as much again. Causality halves
    it: a token sees S/2 on average.
    """
    return 2 * block_costs(shape).matmul_parameters + 2 * shape.query_width * seq_length


def recomputed_flops_per_token(parallel: ParallelConfig, shape: LlamaShape, seq_length: float) -> float:
    """Return the operations per token that activation checkpointing repeats; `seq_length` is as in `flops_per_token`.

    A checkpointed block repeats all but its last matrix product, whose result backward does not need. The sum with
    `flops_per_token` is the numerator of HFU (Chowdhery et al. 2022, appendix B), which does not count the
    recomputation inside a flash kernel's backward.
    """
    if not parallel.fsdp_activation_checkpointing or parallel.selective_checkpointing == PER_OPERATION:
        return 0.0
    blocks = len(checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers))
    return blocks * (block_forward_flops(shape, seq_length) - 2 * block_costs(shape).last_product)
