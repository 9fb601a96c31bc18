"""Parameters of a model, and the costs of its blocks: said once for the decoder, measured for a user-defined block.

Letters: D hidden, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from math import prod

from pretraining.config.plugins import plugin_errors
from pretraining.config.variants import LlamaShape, load_block


def parameter_count(shape: LlamaShape) -> int:
    """Return the number of trained parameters.

    Besides the blocks: the embedding (V x D), the last norm (D) and, unless tied, the head (V x D).
    """
    width = shape.hidden_size
    matrices_of_vocabulary = 1 if shape.tie_word_embeddings else 2
    blocks = shape.num_hidden_layers * block_parameters(shape)
    return blocks + matrices_of_vocabulary * shape.vocab_size * width + width


def block_parameters(shape: LlamaShape) -> int:
    """Return the parameters of a block: matrices, norms and biases."""
    return sum(rows * columns for rows, columns in block_matrices(shape)) + sum(block_vectors(shape))


def block_matrices(shape: LlamaShape) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of a block's matrices: q (HE x D), k, v (KE x D), o, gate, up (F x D) and down.

    Those of a user-defined block are measured, in the order of its parameters.
    """
    if shape.block is not None:
        return _measure_block(shape)[0]
    width, feed_forward = shape.hidden_size, shape.intermediate_size
    query, key = shape.query_width, shape.key_width
    attention = ((query, width), (key, width), (key, width), (width, query))
    return (*attention, (feed_forward, width), (feed_forward, width), (width, feed_forward))


def block_vectors(shape: LlamaShape) -> tuple[int, ...]:
    """Return the lengths of a block's norms and biases: two norms (D), and those that the switches add."""
    if shape.block is not None:
        return _measure_block(shape)[1]
    width, query, key = shape.hidden_size, shape.query_width, shape.key_width
    norms = {"off": (), "head": (shape.head_dim, shape.head_dim), "whole": (query, key)}[shape.qk_norm]
    of_attention = {"false": (), "qkv": (query, key, key), "true": (query, key, key, width)}[shape.attention_bias]
    of_feed_forward = (shape.intermediate_size, shape.intermediate_size, width) if shape.mlp_bias else ()
    return (width, width, *norms, *of_attention, *of_feed_forward)


@dataclass(frozen=True)
class BlockCosts:
    """Sizes of a decoder block, from which operations, memory and time are computed.

    Attributes:
        matrices: rows and columns of q, k, v, o, gate, up and down.
        vectors: lengths of norms and biases.
        query_width: H·E.
        results: elements per token in the results of matrix products and attention.
        last_product: parameters of the last matrix product (down), whose result backward does not need.
    """

    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[int, ...]
    query_width: int
    results: int
    last_product: int

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matrix products."""
        return sum(rows * columns for rows, columns in self.matrices)


def block_costs(shape: LlamaShape) -> BlockCosts:
    """Return the costs of one block."""
    matrices = block_matrices(shape)
    return BlockCosts(
        matrices=matrices,
        vectors=block_vectors(shape),
        query_width=shape.query_width,
        results=shape.query_width + sum(rows for rows, _ in matrices),
        last_product=prod(matrices[-1]) if matrices else 0,
    )


@cache
def _measure_block(shape: LlamaShape) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Build a user-defined block without memory, and return its matrices and the sizes of its other parameters."""
    import torch

    assert shape.block is not None
    block = load_block(shape.block)
    with plugin_errors("block", shape.block), torch.device("meta"):
        sizes = [tuple(parameter.shape) for parameter in block(shape, 0).parameters()]
    matrices = tuple((size[0], math.prod(size[1:])) for size in sizes if len(size) > 1)
    return matrices, tuple(math.prod(size) for size in sizes if len(size) < 2)
