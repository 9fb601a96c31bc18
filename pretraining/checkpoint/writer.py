"""Writer of checkpoints: which process writes which chunks into which file, and how a checkpoint is committed.

    sharded tensors         -> `plan_save`: chunks per file of this process, without communication
    plan                    -> `write_chunks`: safetensors files, with checksums computed while writing
    files of all processes  -> `save_checkpoint`: manifest.json last, then one rename

    <run>/checkpoints/step_1000_ckp.1f9c.tmp/     being written: never read, removed by the next save
    <run>/checkpoints/step_1000_ckp/              committed: all files are there and flushed

A process that dies at any moment leaves older checkpoints unchanged. Files hold the offsets of sharded tensors in the
form of torch's HuggingFaceStorageWriter, so torch's reader reads these files, too. Shards are written without a gather.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pretraining.checkpoint.chunks import CHUNK_BYTES, DTYPES, Chunk, local_chunk, local_tensor, memory_of
from pretraining.checkpoint.lease import Lease
from pretraining.checkpoint.manifest import MANIFEST, SHARD_SUFFIX, FileEntry, Manifest
from pretraining.checkpoint.run_folder import distinct_name, remove_checkpoint, temporary_name, unfinished_saves
from pretraining.checkpoint.stored_files import ChecksummedFile
from pretraining.distributed.grad_norm import is_sharded
from pretraining.distributed.processes import gather_from_every_rank, on_rank_zero
from pretraining.errors import CheckpointError
from pretraining.files import exists, flush_folder, with_retries, write_flushed, writing_into

# A process writes a file per thread: one file's checksum is computed while another is copied or flushed. Files have a
# minimum size, below which creating them takes longer than filling them, and a maximum size.
FILES_OF_PROCESS = 4
SMALL_FILE_BYTES = 2**25
FILE_BYTES = 2**30
WRITING_THREADS = 4

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors by name."""


# The commit protocol


class Save(Protocol):
    """Part of a checkpoint that one process writes: `SavePlan`, or `pt_files.FullSave`."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint, over all processes."""

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write this process's files; return their sizes and checksums by name."""


def save_checkpoint(
    folder: Path, plan: Save, manifest: Manifest, *, group: dist.ProcessGroup | None = None, lease: Lease | None = None
) -> None:
    """Write a checkpoint that appears complete or not at all; a collective call, also in a background thread.

    Args:
        folder: folder to commit to; its parent holds the run's checkpoints.
        manifest: without its `files`.
        group: process group of all ranks.
        lease: a lost lease prevents the commit.

    Raises:
        CheckpointError: a file cannot be written; older checkpoints are untouched.
    """
    temporary = on_rank_zero(lambda: _make_temporary_folder(folder, plan), group)
    try:
        written = gather_from_every_rank(lambda: _write(temporary, plan), group)
        files = {name: entry for entries in written for name, entry in sorted(entries.items())}
        on_rank_zero(lambda: _commit(temporary, folder, plan, replace(manifest, files=files), lease), group)
    except CheckpointError:  # every rank has it
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # frees space on a full disk
        raise


def _make_temporary_folder(folder: Path, plan: Save) -> Path:
    """Make an empty folder for a save, and remove the leftovers of interrupted saves."""
    temporary = temporary_name(folder)
    with writing_into(folder, plan.total_bytes):
        for abandoned in unfinished_saves(folder.parent.parent):
            remove_checkpoint(abandoned)
        temporary.mkdir(parents=True)
    return temporary


def _write(temporary: Path, plan: Save) -> dict[str, FileEntry]:
    with writing_into(temporary, plan.total_bytes):
        return plan.write(temporary)


def _commit(temporary: Path, folder: Path, plan: Save, manifest: Manifest, lease: Lease | None) -> None:
    content = json.dumps(manifest.document(), indent=1, allow_nan=False).encode()
    with writing_into(temporary / MANIFEST, plan.total_bytes):
        with_retries(lambda: write_flushed(temporary / MANIFEST, content), f"writing {temporary / MANIFEST}")
        flush_folder(temporary)
    if lease is not None:
        lease.check()
    # A damaged or older checkpoint under this name is renamed first, so that one of the two exists at any moment.
    replaced = folder.with_name(distinct_name(folder.name, manifest.step))
    with writing_into(folder, plan.total_bytes):
        if exists(folder):
            if exists(replaced):
                remove_checkpoint(replaced)
            folder.rename(replaced)
        with_retries(lambda: temporary.rename(folder), f"renaming {temporary}")
        flush_folder(folder.parent)
        if exists(replaced):
            remove_checkpoint(replaced)


# Which process writes which chunks: computed from shapes and the mesh, the same on every process


@dataclass(frozen=True)
class WriteItem:
    """Chunk of a tensor, with its values."""

    name: str
    chunk: Chunk
    values: torch.Tensor


@dataclass(frozen=True)
class SavePlan:
    """Files that one process writes of a sharded checkpoint.

    Attributes:
        files: items by file name.
        total_bytes: bytes of all processes.
    """

    files: dict[str, list[WriteItem]]
    total_bytes: int

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write this process's files in parallel; return their sizes and checksums by name."""

        def write(name: str) -> FileEntry:
            return with_retries(lambda: write_chunks(folder / name, self.files[name]), f"writing {folder / name}")

        with ThreadPoolExecutor(WRITING_THREADS, thread_name_prefix="checkpoint") as pool:
            return dict(zip(self.files, pool.map(write, self.files), strict=True))


def plan_save(tensors: Mapping[str, torch.Tensor]) -> SavePlan:
    """Return the files that this process writes for a checkpoint of `tensors`; nothing is copied."""
    numbers, shard = file_of_tensor(tensors, dist.get_world_size()), dist.get_rank() + 1
    count = max(numbers.values(), default=0)
    files: dict[str, list[WriteItem]] = {}
    for name in _tensors_to_write(tensors):
        file = f"shard-{shard:05d}-model-{numbers[name]:05d}-of-{count:05d}{SHARD_SUFFIX}"
        item = WriteItem(name, local_chunk(tensors[name]), local_tensor(tensors[name]))
        files.setdefault(file, []).append(item)
    return SavePlan(files, sum(tensor.nbytes for tensor in tensors.values()))


def _tensors_to_write(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors whose local shard this process writes; processes with the same shard share the work."""
    written: dict[int, list[int]] = {}  # number of replicas -> bytes that each replica writes
    mine = []
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        tensor = tensors[name]
        index, replicas = _replica_of(tensor)
        loads = written.setdefault(replicas, [0] * replicas)
        writer = loads.index(min(loads))
        loads[writer] += tensor.nbytes
        if writer == index and local_tensor(tensor).numel() > 0:
            mine.append(name)
    return sorted(mine)


def _replica_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return this process's index among the holders of the same shard, and their number."""
    if not is_sharded(tensor):
        return dist.get_rank(), dist.get_world_size()
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None, "this process is not part of the tensor's mesh"
    index, replicas = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            index, replicas = index * size + coordinates[axis], replicas * size
    return index, replicas


def file_of_tensor(tensors: Mapping[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """Return the file number, from 1, of each tensor; each process has its own files.

    Tensors are in the order of their names. `SMALL_FILE_BYTES` and `FILE_BYTES` limit a file's size.
    """
    of_process = sum(tensor.nbytes for tensor in tensors.values()) // world_size
    file_bytes = min(max(-(-of_process // FILES_OF_PROCESS), SMALL_FILE_BYTES), FILE_BYTES)
    files, before = {}, 0
    for name in sorted(tensors):
        files[name] = 1 + before // (file_bytes * world_size)
        before += tensors[name].nbytes
    return files


# Safetensors: 8 bytes with the length of the header | header, JSON | the tensors' bytes in order


def write_chunks(path: Path, items: Sequence[WriteItem]) -> FileEntry:
    """Write chunks of tensors into a safetensors file; returns as `write_tensors`."""
    # Wide elements come first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(items, key=lambda item: (-item.values.element_size(), item.name))
    offsets = {item.name: {"saved_offsets": item.chunk.offsets} for item in ordered}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    kinds = {item.name: (item.values.dtype, item.chunk.sizes) for item in ordered}
    return write_tensors(path, kinds, (item.values for item in ordered), metadata)


def write_tensors(
    path: Path, kinds: Kinds, values: Iterable[torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileEntry:
    """Write tensors into a safetensors file and flush it to disk; an existing file is replaced.

    Args:
        values: tensors in the order of `kinds`; only one is held at a time.

    Returns:
        Size and checksum of the file, computed from memory without reading back.
    """
    with ChecksummedFile(path) as file:
        # Small tensors are joined, since threads wait for each other at each write; larger pieces are not copied.
        joined = io.BufferedWriter(file, CHUNK_BYTES - 1)
        joined.write(_header(kinds, metadata or {"format": "pt"}))
        for (dtype, shape), value in zip(kinds.values(), values, strict=True):
            assert value.dtype == dtype and tuple(value.shape) == tuple(shape)
            content = memory_of(value.cpu().contiguous())
            for begin in range(0, len(content), CHUNK_BYTES):
                joined.write(content[begin : begin + CHUNK_BYTES])
        joined.flush()
        return file.finish()


def _header(kinds: Kinds, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape) in kinds.items():
        end = begin + size_of(dtype, shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in bytes."""
    return prod(shape) * dtype.itemsize
