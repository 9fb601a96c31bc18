"""How tensors are read back from files, whatever the form of the files and the layout that wrote them.

    files    -> `StoredTensors`: which chunk of which tensor begins at which byte
    a tensor -> the stored chunks that overlap with it -> `read_chunk`: from the disk into the tensor's memory

`open_tensors` compares the files with what was written, and `read_tensor` reads one tensor at a time, in one process.
`load_tensors` fills the tensors of all ranks in one pass, and compares each byte on its way:

    headers, each rank a share          -> which rank needs which parts of which file
    what a rank needs wholly            -> read by it once: the checksum is computed while the bytes are copied
    files that no rank needs wholly     -> read by one rank more, for their checksums alone
    what every rank has found           -> told to all, before any of them uses a tensor

With the layout that wrote the checkpoint every file is needed wholly.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.completeness import first_faults, tensor_faults
from pretraining.checkpoint.headers import Header, StoredChunk, StoredTensors, read_headers, reading
from pretraining.checkpoint.manifest import MODEL_FILE, FileEntry, Manifest, crc32_text, size_fault
from pretraining.checkpoint.writer import CHUNK_BYTES, Chunk, local_chunk, local_tensor, memory_of
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.distributed.torch_private import free_pinned_memory
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import file_checksum

READING_THREADS = 4
BUFFER_BYTES = 2**26
"""Of each thread, for what is converted, cut or sent to a device on its way."""

Files = Mapping[str, FileEntry | None]
"""Names of a folder's files, and where they are known, size and checksum."""


# One process: a tensor at a time


def open_tensors(folder: Path, files: Files) -> StoredTensors:
    """Find the tensors in the files of a folder, once the files are compared with what is known of them.

    Raises:
        DamagedError: a file is not what was written, or cannot be read.
    """
    faults = file_faults(folder, files, READING_THREADS)
    if faults:
        raise DamagedError("; ".join(faults))
    return read_headers(folder, files)


def read_tensor(stored: StoredTensors, name: str) -> torch.Tensor:
    """Return a tensor in new memory on the CPU.

    Raises:
        CheckpointError: a file cannot be read, or its chunks are not the whole tensor.
    """
    values = torch.empty(stored.shape(name), dtype=stored.chunks[name][0].dtype)
    for read in _reads_of(stored, name, values, converts=False):
        _read_file(stored.folder / read.stored.file, [read])
    return values


# All processes: every tensor in one pass


def load_tensors(
    folder: Path, files: Files, tensors: Mapping[str, torch.Tensor], manifest: Manifest | None = None
) -> None:
    """Read files into `tensors`, in place, whatever the layout that wrote them; a collective call.

    Files that other programs write, too (.pt, and all without a manifest), may hold other floating-point types: these
    are converted.

    Args:
        files: all of them; those with size and checksum are compared, also where no tensor of them is asked for.
        tensors: the same names on every rank.
        manifest: of a checkpoint; its files must hold all of its model. None = the tensors that are asked for.

    Raises:
        DamagedError: names every file that is not what was written, or what the files lack; the tensors hold anything.
        CheckpointError: a tensor is missing, or of another shape or type.
    """
    try:
        # Each rank opens its share of the files and tells the others.
        headers = gather_from_every_rank(lambda: read_headers(folder, sorted(files)[_own_share()]).headers)
        stored = StoredTensors(folder, {name: header for share in headers for name, header in share.items()})
        if manifest is not None:
            shares = gather_from_every_rank(lambda: tensor_faults(stored, manifest, _own_share()))
            if faults := [fault for share in shares for fault in share]:
                raise DamagedError(first_faults(faults))
        results = gather_from_every_rank(lambda: _fill(stored, files, tensors))
    except CheckpointError:
        check_files(folder, files)  # a damaged header may seem to be of other tensors
        raise
    compared = {name for of_rank in results for name in of_rank}
    # Several ranks may have read the same file, and one of them alone what was not written.
    faults = list(dict.fromkeys(fault for of_rank in results for fault in of_rank.values() if fault is not None))
    check_files(folder, {name: entry for name, entry in files.items() if name not in compared}, faults)


def check_files(folder: Path, files: Files, faults: Sequence[str] = ()) -> None:
    """Read every file of known content, each rank a share, and compare with the manifest; a collective call.

    Args:
        faults: what is known to be wrong with other files, the same on every rank.

    Raises:
        DamagedError: names every file whose content is not what was written.
    """
    own = {name: files[name] for name in sorted(files)[_own_share()]}
    shares = gather_from_every_rank(lambda: file_faults(folder, own, READING_THREADS))
    if faults := [*faults, *(fault for share in shares for fault in share)]:
        raise DamagedError("; ".join(faults))


def file_faults(folder: Path, files: Files, threads: int) -> list[str]:
    """Read the files of known content wholly, and return what differs from what was written."""
    known = {folder / name: entry for name, entry in files.items() if entry is not None}
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        return list(filter(None, pool.map(_file_fault, known, known.values())))


def _file_fault(path: Path, written: FileEntry) -> str | None:
    """Read a file wholly, and return what differs from what was written, if anything does."""
    try:
        return size_fault(path, written) or _checksum_fault(path, reading(path, file_entry).crc32, written)
    except CheckpointError as error:
        return str(error)


def file_entry(path: Path) -> FileEntry:
    """Return size and checksum of a file as it is on disk."""
    checksum, size = file_checksum(path)
    return FileEntry(size, checksum)


def _checksum_fault(path: Path, crc32: str, written: FileEntry) -> str | None:
    if crc32 == written.crc32:
        return None
    return f"{path} is damaged: its checksum is {crc32} in place of {written.crc32}"


def _own_share() -> slice:
    """Return which entries of a sequence are this rank's to do; all of a process that has joined no others."""
    return slice(dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else slice(None)


def _fill(stored: StoredTensors, files: Files, tensors: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """Read this rank's part of every tensor; return what is wrong, if anything, with each file that was compared."""
    converts = MODEL_FILE in files or None in files.values()
    reads: dict[str, list[ReadItem]] = {}
    for name, tensor in tensors.items():
        for read in _reads_of(stored, name, tensor, converts):
            reads.setdefault(read.stored.file, []).append(read)

    faults: dict[str, str | None] = {}

    def read_from(name: str) -> None:
        path, entry, header = stored.folder / name, files[name], stored.headers[name]
        in_order = sorted(reads[name], key=lambda read: read.stored.begin)
        is_compared = entry is not None and _is_whole(in_order, header, entry)
        crc32 = _read_file(path, in_order, header.crc32 if is_compared else None)
        if entry is not None and crc32 is not None:
            faults[name] = _checksum_fault(path, crc32_text(crc32), entry)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="restore") as pool:
        list(pool.map(read_from, reads))
    free_pinned_memory()
    return faults


def _is_whole(reads: Iterable[ReadItem], header: Header, entry: FileEntry) -> bool:
    """Return whether header and reads, one after the other, are all of a file."""
    if header.crc32 is None:
        return False
    end = header.bytes
    for read in reads:
        if read.part != read.stored.chunk or read.stored.begin != end:
            return False
        end += read.stored.bytes
    return end == entry.bytes


# From the disk into memory


@dataclass(frozen=True)
class ReadItem:
    """A part of a stored chunk, and the memory that it goes to."""

    stored: StoredChunk
    part: Chunk
    target: torch.Tensor


def _reads_of(stored: StoredTensors, name: str, tensor: torch.Tensor, converts: bool) -> list[ReadItem]:
    """Return what to read for this process's part of a tensor.

    Raises:
        CheckpointError: the chunks have not the type and shape of the tensor, or not as many elements.
    """
    chunks, shape = stored.chunks.get(name, []), stored.shape(name)
    dtypes = {each.dtype for each in chunks}
    if converts and tensor.is_floating_point() and all(dtype.is_floating_point for dtype in dtypes):
        dtypes = {tensor.dtype}
    count = sum(each.chunk.count for each in chunks)
    if dtypes != {tensor.dtype} or shape != tuple(tensor.shape) or count != tensor.numel():
        raise CheckpointError(
            f"{name} cannot be loaded: {count:,} elements of shape {list(shape)} are there, and "
            f"{list(tensor.shape)} in {tensor.dtype} is needed",
            path=stored.folder,
        )
    wanted, reads = local_chunk(tensor), []
    for each in chunks:
        part = wanted.overlap(each.chunk)
        if part is not None:
            target = local_tensor(tensor)
            for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                target = target.narrow(dim, begin - wanted.offsets[dim], size)
            reads.append(ReadItem(each, part, target))
    return reads


def _read_file(path: Path, reads: Iterable[ReadItem], begun: int | None = None) -> int | None:
    """Read parts of a file, in order; continue the checksum of what stands before them, if there is one."""

    def read(path: Path) -> int | None:
        crc32 = begun
        with path.open("rb", buffering=0) as file:
            for item in reads:
                crc32 = read_chunk(file.fileno(), item, crc32)
        return crc32

    return reading(path, read)


def read_chunk(descriptor: int, read: ReadItem, crc32: int | None = None) -> int | None:
    """Read a part of a stored chunk into its place and convert it; a CheckpointError if the file ends early.

    Args:
        crc32: of the file up to the part, which is then the whole chunk; None = do not compute one.

    Returns:
        The checksum of the file up to the end of the chunk.
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
    # For a GPU it is pinned, and always of one size: PyTorch gives what one chunk has freed to the next.
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
