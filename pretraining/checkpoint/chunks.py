"""Chunks of tensors: the parts of a checkpoint's tensors that files and processes hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub

import torch
from torch import nn

from pretraining.checkpoint.manifest import OPTIMIZER_PREFIX
from pretraining.distributed.grad_norm import is_sharded, local_part
from pretraining.optim.state import state_tensors

CHUNK_BYTES = 2**20  # fits a core's cache, so that a chunk is checked and copied with one read from memory

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their names in safetensors."""


@dataclass(frozen=True)
class Chunk:
    """Rectangular part of a tensor: its offset and its size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Offset after the last element, in each dim."""
        return tuple(map(add, self.offsets, self.sizes))

    @staticmethod
    def whole(shape: Sequence[int]) -> Chunk:
        """Return the chunk that is the whole tensor."""
        return Chunk((0,) * len(shape), tuple(shape))

    def overlap(self, other: Chunk) -> Chunk | None:
        """Return the intersection with another chunk of the same tensor, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.ends, other.ends), begins))
        return Chunk(begins, sizes) if all(size > 0 for size in sizes) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor, without a copy."""
    return local_part(tensor).detach()


def local_chunk(tensor: torch.Tensor) -> Chunk:
    """Return the place of the local shard in the whole tensor."""
    if not is_sharded(tensor):
        return Chunk.whole(tensor.shape)
    (held,) = tensor.__create_chunk_list__()  # DTensor's protocol for checkpoints
    return Chunk(tuple(held.offsets), tuple(held.sizes))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def tensor_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, without a copy: loading into them restores the run.

    Args:
        optimizer: its state must be materialised, or there is none yet; None = parameters only.
    """
    tensors: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in parameters.items()}
    if optimizer is not None:
        for name, parameter in parameters.items():
            for key, value in state_tensors(optimizer, parameter).items():
                tensors[f"{OPTIMIZER_PREFIX}{key}.{name}"] = value
    return tensors
