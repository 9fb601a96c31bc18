"""Compilation of a model's blocks with torch.compile.

Blocks are alike, so the compiled code of one block serves all: 80 blocks compile as fast as 2. Each block is one graph;
a graph break, which would silently cost speed, is an error. Compilation follows activation checkpointing, so that the
compiler sees the recomputation, and precedes sharding, so that gathering stays outside of the graphs. Embedding, head
and loss are not compiled: nearly all of their work is one matrix product.

Inputs of a block have fixed shapes, so only the first step compiles, and the first evaluation (no gradients).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block, in place, on its first use."""
    # Code of an earlier model in this process, as before a rollback, would count against the limit on recompilations.
    torch.compiler.reset()
    for block in blocks:
        block.compile(fullgraph=True)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run compiled blocks in eager mode, for inputs whose shape changes on each call."""
    with torch.compiler.set_stance("force_eager"):
        yield
