"""How many floating-point operations a token of training costs.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape


def matmul_parameters(shape: LlamaShape) -> int:
    """Returns the parameters that a token is multiplied with, of the blocks and of the head.

    attention     q and o: D·(H·E) each; k and v: D·(K·E) each
    feed-forward  gate, up, down: D·F each
    head          D·V, tied or not. The embedding is a look-up and never counts.
    """
    attention = 2 * shape.hidden_size * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    feed_forward = 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_hidden_layers * (attention + feed_forward) + shape.hidden_size * shape.vocab_size


def flops_per_token(shape: LlamaShape, seq_length: float) -> float:
    """Returns the floating-point operations of training for one token: 6 x matmul parameters + 6·L·(H·E)·S.

    Matrices: 2 FLOPs a token and parameter, a multiplication and an addition. Backward does that twice more, for the
    gradients of input and parameter: 2 + 4 = 6.

    Attention: a token's scores against S keys cost 2·(H·E)·S, its mix of S values again; three times that for forward
    and backward is 12·(H·E)·S a layer. Causality leaves half, since a token sees S/2 others on average.

    This is what the model needs: recomputed activations, norms, rotations and softmax do not count. It is the numerator
    of MFU in PaLM (Chowdhery et al. 2022, appendix B), except that the attention term there is not halved.

    Args:
        shape: dimensions of the model.
        seq_length: S, tokens a sequence. Under a document mask, the tokens of the document that a token is in, on
            average over tokens: the formula is linear in it.
    """
    attention = 6 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * seq_length
    return 6 * matmul_parameters(shape) + attention


def recomputed_flops_per_token(shape: LlamaShape, share: float, seq_length: float) -> float:
    """Returns the operations a token that activation checkpointing repeats: a share of the forward of the blocks.

        forward of the blocks  =  2 x matmul parameters of the blocks  +  2·L·(H·E)·S

    With `flops_per_token` it is the numerator of HFU (Chowdhery et al. 2022, appendix B), in which what a flash kernel
    repeats inside its backward does not count. `seq_length` is as in `flops_per_token`.
    """
    matrices = 2 * (matmul_parameters(shape) - shape.hidden_size * shape.vocab_size)
    attention = 2 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * seq_length
    return share * (matrices + attention)


def recomputed_share(parallel: ParallelConfig, shape: LlamaShape, seq_length: float) -> float:
    """Returns the operations that backward repeats, as a share of those of the blocks' forward; 0 = none.

    A checkpointed block repeats all but its last matrix product, whose result backward does not need. Operations are
    counted as above. `seq_length` is the tokens that attention reaches over: of a sequence, or of a
    document on average.
    """
    if not parallel.fsdp_activation_checkpointing or parallel.selective_checkpointing == PER_OPERATION:
        return 0.0
    blocks = checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers)
    query_width, key_width = (
        heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads)
    )
    attention = 2 * shape.hidden_size * 2 * (query_width + key_width) + 2 * query_width * seq_length
    product = 2 * shape.hidden_size * shape.intermediate_size  # gate, up, down: one each
    return len(blocks) / shape.num_hidden_layers * (1 - product / (attention + 3 * product))
