"""Reader of tensors from the files of a checkpoint, in any form and from any layout.

    files    -> `StoredTensors`: the byte at which each chunk of each tensor begins
    tensor   -> the stored chunks that overlap it -> `read_chunk`: from disk into the tensor's memory

In one process, `open_tensors` checks the files, and `read_tensor` reads one tensor at a time. On all ranks,
`load_tensors` fills all tensors and checks every byte in one pass:

    headers, divided among ranks        -> the parts of each file that a rank needs
    files that a rank needs wholly      -> read once: the checksum is computed while bytes are copied
    files that no rank needs wholly     -> read again by one rank, for the checksum alone
    faults that a rank finds            -> sent to all ranks before any rank uses a tensor

In the layout that wrote the checkpoint, every file is needed wholly.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.chunks import CHUNK_BYTES, Chunk, local_chunk, local_tensor, memory_of
from pretraining.checkpoint.completeness import first_faults, tensor_faults
from pretraining.checkpoint.headers import Header, StoredChunk, StoredTensors, read_headers, read_with_retries
from pretraining.checkpoint.manifest import MODEL_FILE, FileEntry, Files, Manifest
from pretraining.checkpoint.stored_files import crc32_text, size_fault
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.distributed.torch_private import free_pinned_memory
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import file_checksum

READING_THREADS = 4
BUFFER_BYTES = 2**26
"""Per thread, for values that are converted, cut, or copied to a device."""

# In one process: one tensor at a time


def open_tensors(folder: Path, files: Files) -> StoredTensors:
    """Find the tensors in the files of a folder, after checking files with known checksums.

    Raises:
        DamagedError: a file differs from its checksum or size, or cannot be read.
    """
    faults = file_faults(folder, files, READING_THREADS)
    if faults:
        raise DamagedError("; ".join(faults))
    return read_headers(folder, files)


def open_whole_model(folder: Path, manifest: Manifest) -> StoredTensors:
    """Find the tensors of a checkpoint, after checking its files, and that they hold its model.

    Raises:
        CheckpointError: a file is damaged, or the files do not hold each element of the model once.
    """
    stored = open_tensors(folder, manifest.files)
    if faults := tensor_faults(stored, manifest):
        raise CheckpointError(first_faults(faults) + f". See `pretrain verify {folder}`")
    return stored


def read_tensor(stored: StoredTensors, name: str) -> torch.Tensor:
    """Return a tensor in new memory on the CPU.

    Raises:
        CheckpointError: a file cannot be read, or the chunks do not make up the tensor.
    """
    values = torch.empty(stored.shape(name), dtype=stored.chunks[name][0].dtype)
    for read in _plan_reads(stored, name, values, converts=False):
        _read_file(stored.folder / read.stored.file, [read])
    return values


# On all ranks: all tensors in one pass


def load_tensors(
    folder: Path,
    files: Files,
    tensors: Mapping[str, torch.Tensor],
    manifest: Manifest | None = None,
    resized: Collection[str] = (),
) -> None:
    """Read files into `tensors` in place, from any layout; a collective call.

    Floating-point types are converted for files that other programs write, too: .pt files, and files without a
    manifest.

    Args:
        files: all files; those with size and checksum are checked, even if none of their tensors is needed.
        tensors: the same names on every rank.
        manifest: the files must hold its whole model; None = only `tensors` must be there.
        resized: tensors that may have another number of rows in the files: only rows that both have are read.

    Raises:
        DamagedError: names every damaged file, or what the files lack; the tensors' values are undefined.
        CheckpointError: a tensor is missing, or of another shape or type.
    """
    try:
        # Each rank reads a share of the headers, and sends them to the other ranks.
        headers = gather_from_every_rank(lambda: read_headers(folder, sorted(files)[_own_share()]).headers)
        stored = StoredTensors(folder, {name: header for share in headers for name, header in share.items()})
        if manifest is not None:
            shares = gather_from_every_rank(lambda: tensor_faults(stored, manifest, _own_share()))
            if faults := [fault for share in shares for fault in share]:
                raise DamagedError(first_faults(faults))
        results = gather_from_every_rank(lambda: _load_local(stored, files, tensors, resized))
    except CheckpointError:
        check_files(folder, files)  # a damaged header may look like one of other tensors
        raise
    compared = {name for of_rank in results for name in of_rank}
    # Several ranks may have read the same damaged file: name it once.
    faults = list(dict.fromkeys(fault for of_rank in results for fault in of_rank.values() if fault is not None))
    check_files(folder, {name: entry for name, entry in files.items() if name not in compared}, faults)


def check_files(folder: Path, files: Files, faults: Sequence[str] = ()) -> None:
    """Check the files with known checksums, divided among ranks; a collective call.

    Args:
        faults: faults of other files, the same on every rank.

    Raises:
        DamagedError: names every damaged file.
    """
    own = {name: files[name] for name in sorted(files)[_own_share()]}
    shares = gather_from_every_rank(lambda: file_faults(folder, own, READING_THREADS))
    if faults := [*faults, *(fault for share in shares for fault in share)]:
        raise DamagedError("; ".join(faults))


def file_faults(folder: Path, files: Files, threads: int) -> list[str]:
    """Read whole files with known checksums, and return a message per difference."""
    known = {folder / name: entry for name, entry in files.items() if entry is not None}
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        return list(filter(None, pool.map(_file_fault, known, known.values())))


def _file_fault(path: Path, written: FileEntry) -> str | None:
    """Read a whole file; return a message if it differs from its manifest, else None."""
    try:
        return size_fault(path, written) or _checksum_fault(path, read_with_retries(path, file_checksum)[0], written)
    except CheckpointError as error:
        return str(error)


def _checksum_fault(path: Path, crc32: str, written: FileEntry) -> str | None:
    if crc32 == written.crc32:
        return None
    return f"{path} is damaged: its checksum is {crc32}, not {written.crc32}"


def _own_share() -> slice:
    """Return this rank's share of a sequence; all of it without a process group."""
    return slice(dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else slice(None)


def _load_local(
    stored: StoredTensors, files: Files, tensors: Mapping[str, torch.Tensor], resized: Collection[str]
) -> dict[str, str | None]:
    """Read this rank's part of every tensor; return a message, or None, per file whose checksum was compared."""
    converts = MODEL_FILE in files or None in files.values()
    reads: dict[str, list[ReadItem]] = {}
    for name, tensor in tensors.items():
        for read in _plan_reads(stored, name, tensor, converts, is_resized=name in resized):
            reads.setdefault(read.stored.file, []).append(read)

    faults: dict[str, str | None] = {}

    def read_from(name: str) -> None:
        path, entry, header = stored.folder / name, files[name], stored.headers[name]
        in_order = sorted(reads[name], key=lambda read: read.stored.begin)
        is_compared = entry is not None and _covers_file(in_order, header, entry)
        crc32 = _read_file(path, in_order, header.crc32 if is_compared else None)
        if entry is not None and crc32 is not None:
            faults[name] = _checksum_fault(path, crc32_text(crc32), entry)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="restore") as pool:
        list(pool.map(read_from, reads))
    free_pinned_memory()
    return faults


def _covers_file(reads: Iterable[ReadItem], header: Header, entry: FileEntry) -> bool:
    """Return whether the header and the reads, in order, cover the whole file."""
    if header.crc32 is None:
        return False
    end = header.bytes
    for read in reads:
        if read.part != read.stored.chunk or read.stored.begin != end:
            return False
        end += read.stored.bytes
    return end == entry.bytes


# From disk into memory


@dataclass(frozen=True)
class ReadItem:
    """Part of a stored chunk, and the memory that it is read into."""

    stored: StoredChunk
    part: Chunk
    target: torch.Tensor


def _plan_reads(
    stored: StoredTensors, name: str, tensor: torch.Tensor, converts: bool, *, is_resized: bool = False
) -> list[ReadItem]:
    """Return the reads for this process's part of a tensor; raise a CheckpointError if the chunks do not fit it."""
    chunks, shape = stored.chunks.get(name, []), stored.shape(name)
    dtypes = {chunk.dtype for chunk in chunks}
    if converts and tensor.is_floating_point() and all(dtype.is_floating_point for dtype in dtypes):
        dtypes = {tensor.dtype}
    count, wanted_shape = sum(chunk.chunk.count for chunk in chunks), tuple(tensor.shape)
    is_fitting = shape[1:] == wanted_shape[1:] if is_resized else shape == wanted_shape
    if dtypes != {tensor.dtype} or not is_fitting or count != prod(shape):
        raise CheckpointError(
            f"{name} cannot be loaded: the files hold {count:,} elements of shape {list(shape)}, and this run needs "
            f"{list(tensor.shape)} in {tensor.dtype}",
            path=stored.folder,
        )
    wanted, reads = local_chunk(tensor), []
    for chunk in chunks:
        part = wanted.overlap(chunk.chunk)
        if part is not None:
            target = local_tensor(tensor)
            for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                target = target.narrow(dim, begin - wanted.offsets[dim], size)
            reads.append(ReadItem(chunk, part, target))
    return reads


def _read_file(path: Path, reads: Iterable[ReadItem], header_crc32: int | None = None) -> int | None:
    """Read parts of a file in order; return the file's checksum if that of its header is given."""

    def read(path: Path) -> int | None:
        crc32 = header_crc32
        with path.open("rb", buffering=0) as file:
            for item in reads:
                crc32 = read_chunk(file.fileno(), item, crc32)
        return crc32

    return read_with_retries(path, read)


def read_chunk(descriptor: int, read: ReadItem, crc32: int | None = None) -> int | None:
    """Read a part of a stored chunk into its memory, and convert it; raise a CheckpointError if the file ends early.

    Args:
        crc32: checksum of the file up to this part, which must be a whole chunk; None = compute no checksum.

    Returns:
        Checksum of the file up to the end of the chunk.
    """
    stored, part, target = read.stored, read.part, read.target
    offsets = [wanted - begin for wanted, begin in zip(part.offsets, stored.chunk.offsets, strict=True)]
    row = prod(stored.chunk.sizes[1:]) * stored.dtype.itemsize
    begin = stored.begin + (offsets[0] if offsets else 0) * row
    is_whole_rows = part.sizes[1:] == stored.chunk.sizes[1:]
    if is_whole_rows and target.is_cpu and target.is_contiguous() and target.dtype == stored.dtype:
        return _read_all(descriptor, begin, memory_of(target), stored, crc32)
    if not part.sizes:
        part, target = replace(part, offsets=(0,), sizes=(1,)), target.view(1)
    # For a GPU, buffers are pinned and of one size, so that PyTorch reuses them.
    size = BUFFER_BYTES if target.is_cuda else min(BUFFER_BYTES, part.sizes[0] * row)
    buffer = torch.empty(max(size, row), dtype=torch.uint8, pin_memory=target.is_cuda)
    at_once = len(buffer) // max(1, row)
    for first in range(0, part.sizes[0], at_once):
        count = min(at_once, part.sizes[0] - first)
        rows = buffer[: count * row].view(stored.dtype).view(count, *stored.chunk.sizes[1:])
        crc32 = _read_all(descriptor, begin + first * row, memory_of(rows), stored, crc32)
        for dim in range(1, len(offsets)):
            rows = rows.narrow(dim, offsets[dim], part.sizes[dim])
        target.narrow(0, first, count).copy_(rows)
    return crc32


def _read_all(descriptor: int, begin: int, content: memoryview, stored: StoredChunk, crc32: int | None) -> int | None:
    while content:
        buffer = content if crc32 is None else content[:CHUNK_BYTES]
        count = os.preadv(descriptor, [buffer], begin)
        if count == 0:
            raise CheckpointError(f"ends in the middle of {stored.name}", path=stored.file)
        if crc32 is not None:
            crc32 = zlib.crc32(buffer[:count], crc32)
        begin += count
        content = content[count:]
    return crc32
