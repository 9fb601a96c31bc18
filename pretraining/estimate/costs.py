"""Parameters and operations of a model, from the sizes of its blocks: those of the decoder, or measured ones.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, L layers, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import PER_OPERATION, ParallelConfig, checkpointed_blocks
from pretraining.config.variants import LlamaShape, load_block


@dataclass(frozen=True)
class BlockCosts:
    """Sizes of a decoder block, from which parameters, operations, memory and time are computed.

    Attributes:
        matrices: rows and columns of q (HE x D), k, v (KE x D), o, gate, up (F x D) and down; those of a user-defined
            block in the order of its parameters.
        vectors: lengths of norms and biases.
    """

    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[int, ...]

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matrix products."""
        return sum(rows * columns for rows, columns in self.matrices)

    @property
    def parameters(self) -> int:
        """Parameters of the block."""
        return self.matmul_parameters + sum(self.vectors)

    @property
    def results(self) -> int:
        """Elements per token in the results of matrix products."""
        return sum(rows for rows, _ in self.matrices)

    @property
    def last_product(self) -> int:
        """Parameters of the last matrix product (down), whose result backward does not need."""
        return prod(self.matrices[-1]) if self.matrices else 0


@cache
def block_costs(shape: LlamaShape) -> BlockCosts:
    """Return the costs of one block: two norms (D), the matrices, and what the switches add."""
    if shape.block is not None:
        return _measure_block(shape, shape.block)
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    query, key = shape.query_width, shape.key_width
    attention = ((query, width), (key, width), (key, width), (width, query))
    norms = {"off": (), "head": (shape.head_dim, shape.head_dim), "whole": (query, key)}[shape.qk_norm]
    of_attention = {"false": (), "qkv": (query, key, key), "true": (query, key, key, width)}[shape.attention_bias]
    of_feed_forward = (feed_forward, feed_forward, width) if shape.mlp_bias else ()
    return BlockCosts(
        (*attention, (feed_forward, width), (feed_forward, width), (width, feed_forward)),
        (width, width, *norms, *of_attention, *of_feed_forward),
    )


def _measure_block(shape: LlamaShape, path: str) -> BlockCosts:
    """Build a user-defined block without memory, and return the sizes of its parameters."""
    import torch  # here: a user-defined block needs it in any case

    block = load_block(path)
    with plugin_errors("block", path), torch.device("meta"):
        sizes = [tuple(parameter.shape) for parameter in block(shape, 0).parameters()]
    matrices = tuple((size[0], prod(size[1:])) for size in sizes if len(size) > 1)
    return BlockCosts(matrices, tuple(prod(size) for size in sizes if len(size) < 2))


def parameter_count(shape: LlamaShape) -> int:
    """Return the number of trained parameters.

    Besides the blocks: the embedding (V x D), the last norm (D) and, unless tied, the head (V x D).
    """
    matrices_of_vocabulary = 1 if shape.tie_word_embeddings else 2
    root = (matrices_of_vocabulary * shape.vocab_size + 1) * shape.hidden_size
    return shape.num_hidden_layers * block_costs(shape).parameters + root


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
