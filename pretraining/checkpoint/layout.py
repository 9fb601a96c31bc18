"""Which piece of each tensor a process holds, which of them it writes, and into which file.

    tensors, global and sharded -> `local_box`: the part of each that is here
                                -> `written_here`: of parts that several processes hold, one process writes each
                                -> `file_of_tensor`: gathered into files of a fair size
                                -> `own_share`: all of this together, what this process writes

Everything is worked out from shapes and the mesh, the same on every process, so a save needs no planning between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

# So many files a process that its threads have work: checksums of one are computed while another is copied, flushed or
# read. But none so small that making it takes longer than filling it, and none enormous.
FILES_OF_PROCESS = 4
SMALL_FILE_BYTES = 2**25
FILE_BYTES = 2**30


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how long it is, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements inside."""
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The part that both have, or None; the other one is of the same tensor."""
        begins = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [
            min(begin + size, other_begin + other_size)
            for begin, size, other_begin, other_size in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Box(tuple(begins), sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, to be written.

    Attributes:
        name: of the tensor.
        box: which part.
        values: of the part.
    """

    name: str
    box: Box
    values: torch.Tensor


@dataclass(frozen=True)
class Share:
    """What one process writes of a checkpoint.

    Attributes:
        files: pieces by the number of the file that they go into.
        number_of_files: that any process writes, at most.
        total_bytes: of all tensors of the checkpoint, over all processes.
    """

    files: dict[int, list[Piece]]
    number_of_files: int
    total_bytes: int


def own_share(tensors: Mapping[str, torch.Tensor]) -> Share:
    """What this process writes of a checkpoint of `tensors`; the very memory, not copies."""
    numbers = file_of_tensor(tensors, dist.get_world_size())
    files: dict[int, list[Piece]] = {}
    for name in written_here(tensors):
        piece = Piece(name, local_box(tensors[name]), local_tensor(tensors[name]))
        files.setdefault(numbers[name], []).append(piece)
    return Share(files, max(numbers.values(), default=0), sum(map(bytes_of, tensors.values())))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds; the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def local_box(tensor: torch.Tensor) -> Box:
    """Where the part that this process holds lies in the whole tensor."""
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate()
        assert coordinates is not None, "this process is not part of the tensor's mesh"
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                continue
            assert type(placement) is Shard, f"{placement} is no layout of a parameter"
            # As torch.chunk cuts: equal pieces, rounded up, until nothing is left.
            dim, whole = placement.dim, sizes[placement.dim]
            piece = -(-whole // tensor.device_mesh.size(axis))
            begin = min(coordinates[axis] * piece, whole)
            offsets[dim] += begin
            sizes[dim] = min(piece, whole - begin)
    box = Box(tuple(offsets), tuple(sizes))
    assert box.sizes == tuple(local_tensor(tensor).shape), "the tensor is sharded in another way"
    return box


def written_here(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors whose local part this process writes.

    Replicas share the work: each part is written by one of the processes that hold it, about as many bytes by each.

    Args:
        tensors: the same on every process, up to their sharding.
    """
    written: dict[int, list[int]] = {}  # by number of replicas: bytes that each of them writes
    mine = []
    for name in sorted(tensors, key=lambda name: (-bytes_of(tensors[name]), name)):
        tensor = tensors[name]
        index, replicas = _replica_of(tensor)
        loads = written.setdefault(replicas, [0] * replicas)
        writer = loads.index(min(loads))
        loads[writer] += bytes_of(tensor)
        if writer == index and local_tensor(tensor).numel() > 0:
            mine.append(name)
    return sorted(mine)


def _replica_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Which of how many holders of the same part this process is."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank(), dist.get_world_size()
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "this process is not part of the tensor's mesh"
    index, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            size = tensor.device_mesh.size(axis)
            index, replicas = index * size + coordinates[axis], replicas * size
    return index, replicas


def bytes_of(tensor: torch.Tensor) -> int:
    """Size of the whole tensor, wherever its parts are."""
    return tensor.numel() * tensor.element_size()


def file_of_tensor(tensors: Mapping[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """Number of the file, from 1, that each tensor goes into; each process has files of its own with these numbers.

    Tensors of a block stand together, blocks in order. A process has `FILES_OF_PROCESS` of them, fewer where they would
    hold less than `SMALL_FILE_BYTES`, more where they would hold more than `FILE_BYTES`.
    """
    block = re.compile(r"\blayers\.(\d+)\.")

    def place(name: str) -> tuple[int, str]:
        match = block.search(name)
        return (int(match.group(1)) if match else -1), name

    of_process = sum(map(bytes_of, tensors.values())) // world_size
    file_bytes = min(max(-(-of_process // FILES_OF_PROCESS), SMALL_FILE_BYTES), FILE_BYTES)
    files, before = {}, 0
    for name in sorted(tensors, key=place):
        files[name] = 1 + before // (file_bytes * world_size)
        before += bytes_of(tensors[name])
    return files
