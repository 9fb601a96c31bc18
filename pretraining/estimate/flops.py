"""What a decoder block is made of, and how many floating-point operations a token of training costs.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape


@dataclass(frozen=True)
class BlockCosts:
    """What operations, memory and time of a decoder block are counted from.

    Attributes:
        matrices: rows and columns of q, k, v, o, gate, up and down.
        query_width: H·E.
        results: elements that matrix products and attention give for a token.
        last_product: parameters of the matrix product (down) whose result the backward pass does not need.
    """

    matrices: tuple[tuple[int, int], ...]
    query_width: int
    results: int
    last_product: int

    @property
    def matmul_parameters(self) -> int:
        """The parameters that a token is multiplied with."""
        return sum(rows * columns for rows, columns in self.matrices)


def block_costs(shape: LlamaShape) -> BlockCosts:
    """Return what a block of a model costs."""
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention = ((query, width), (key, width), (key, width), (width, query))
    return BlockCosts(
        matrices=(*attention, (feed_forward, width), (feed_forward, width), (width, feed_forward)),
        query_width=query,
        results=2 * (query + key + width + feed_forward),
        last_product=width * feed_forward,
    )


def matmul_parameters(shape: LlamaShape) -> int:
    """Return the parameters that a token is multiplied with, of the blocks and of the head.

    The head counts, tied or not: D·V. The embedding is a look-up and never counts.
    """
    return shape.num_hidden_layers * block_costs(shape).matmul_parameters + shape.hidden_size * shape.vocab_size


def flops_per_token(shape: LlamaShape, seq_length: float) -> float:
    """Return the floating-point operations of training for one token: 6 x matmul parameters + 6·L·(H·E)·S.

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
    attention = 6 * shape.num_hidden_layers * block_costs(shape).query_width * seq_length
    return 6 * matmul_parameters(shape) + attention


def recomputed_flops_per_token(shape: LlamaShape, share: float, seq_length: float) -> float:
    """Return the operations a token that activation checkpointing repeats: a share of the forward of the blocks.

        forward of the blocks  =  2 x matmul parameters of the blocks  +  2·L·(H·E)·S

    With `flops_per_token` it is the numerator of HFU (Chowdhery et al. 2022, appendix B), in which what a flash kernel
    repeats inside its backward does not count. `seq_length` is as in `flops_per_token`.
    """
    block = block_costs(shape)
    matrices = 2 * shape.num_hidden_layers * block.matmul_parameters
    return share * (matrices + 2 * shape.num_hidden_layers * block.query_width * seq_length)


def recomputed_share(parallel: ParallelConfig, shape: LlamaShape, seq_length: float) -> float:
    """Return the operations that backward repeats, as a share of those of the blocks' forward; 0 = none.

    A checkpointed block repeats all but its last matrix product, whose result backward does not need. Operations are
    counted as above. `seq_length` is the tokens that attention reaches over: of a sequence, or of a
    document on average.
    """
    if not parallel.fsdp_activation_checkpointing or parallel.selective_checkpointing == PER_OPERATION:
        return 0.0
    blocks, block = checkpointed_blocks(parallel.selective_checkpointing, shape.num_hidden_layers), block_costs(shape)
    forward = 2 * block.matmul_parameters + 2 * block.query_width * seq_length
    return len(blocks) / shape.num_hidden_layers * (1 - 2 * block.last_product / forward)
