"""Compilation of a model's blocks with torch.compile.

Blocks are alike: one is compiled and the others use the result, so 80 blocks compile as fast as 2. Each is one whole
graph; what would break it into pieces, and cost speed in silence, is an error. Compilation comes after activation
checkpointing, so that the compiler sees what is computed again, and before sharding, whose gathering stays outside of
the graphs. Embedding, head and loss are not compiled: nearly all of their work is one matrix product.

Tokens and positions enter a block as tensors of fixed shape, so only the first step compiles (and the first evaluation,
a forward without gradients).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Have each block compiled, in place, when it is first used."""
    # What an earlier model of this process has left, as before a rollback, counts against the limit on variants.
    torch.compiler.reset()
    for block in blocks:
        block.compile(fullgraph=True)


@contextmanager
def without_compiling() -> Iterator[None]:
    """Run compiled blocks uncompiled, for inputs that have another shape each time."""
    with torch.compiler.set_stance("force_eager"):
        yield
