"""How tensors are read back from files, whatever the form of the files and the layout that wrote them.

    a file   -> `Header`: which chunk of which tensor begins at which byte; a form of files is one `ReadHeader` function
    a wish   -> the stored chunks that overlap with it -> `_read_chunk`: from the disk into the tensor's memory

`TensorFiles` reads any part of any tensor in one process, one tensor at a time. `load_tensors` fills the tensors of all
ranks in one pass, and compares each byte with what was written:

    headers, each rank a share          -> which rank needs which parts of which file
    what a rank needs wholly            -> read by it once: the checksum is computed while the bytes are copied
    files that no rank needs wholly     -> read by one rank more, for their checksums alone
    what every rank has found           -> told to all, before any of them uses a tensor

With the layout that wrote the checkpoint every file is needed wholly. Reading never executes anything.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretraining.checkpoint.manifest import FileEntry, crc32_text
from pretraining.checkpoint.writer import CHUNK_BYTES, DTYPES, Chunk, local_chunk, local_tensor, memory_of
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import file_checksum, with_retries

READING_THREADS = 4
LARGEST_HEADER_BYTES = 10**8

Files = Mapping[str, FileEntry | None]
"""Names of a folder's files, and where they are known, size and checksum."""


# What lies where in a file


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a tensor in a file, and the byte at which it begins."""

    name: str
    dtype: torch.dtype
    chunk: Chunk
    file: str
    begin: int


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        chunks: in the order in which they lie there.
        bytes: length of what stands before the first of them.
        crc32: of these bytes, where the chunks are all the rest; None otherwise.
    """

    chunks: list[StoredChunk]
    bytes: int = 0
    crc32: int | None = None


ReadHeader = Callable[[Path], Header]


def read_header(path: Path) -> Header:
    """Reads the header of a safetensors file.

    Raises:
        CheckpointError: it is no such file, or its tensors do not fill it exactly.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(end - 8, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file")
        content = file.read(length)
    try:
        chunks = _stored_chunks(path.name, json.loads(content), 8 + length, end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that makes no sense ({error})") from None
    return Header(chunks, 8 + length, zlib.crc32(content, zlib.crc32(prefix)))


def _stored_chunks(file: str, header: dict[str, Any], data_begin: int, file_end: int) -> list[StoredChunk]:
    """The chunks of a header, in the order in which they lie in the file; any error where it makes no sense."""
    sharding = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    chunks = []
    for name, entry in header.items():
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        offsets = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
        numbers = (*shape, *offsets, begin, end)
        if (
            len(offsets) != len(shape)
            or not all(isinstance(number, int) and number >= 0 for number in numbers)
            or end - begin != prod(shape) * dtype.itemsize
        ):
            raise ValueError(f"tensor {name}")
        chunks.append(StoredChunk(name, dtype, Chunk(offsets, shape), file, data_begin + begin))
    chunks.sort(key=lambda stored: (stored.begin, stored.chunk.count))
    at = data_begin
    for stored in chunks:
        if stored.begin != at:
            raise ValueError(f"tensor {stored.name} begins at byte {stored.begin}, not {at}")
        at += _bytes_of(stored)
    if at != file_end:
        raise ValueError(f"its tensors end at byte {at} of {file_end}")
    return chunks


def _bytes_of(stored: StoredChunk) -> int:
    return stored.chunk.count * stored.dtype.itemsize


# One process: any part of any tensor


class TensorFiles:
    """Tensors in the files of a folder, whole or in chunks.

    Args:
        files: a file whose size and checksum are known is compared with them before the first chunk is taken from it.
        read_header: reads what such a file holds.

    Raises:
        CheckpointError: a file cannot be read, or chunks of one name are not of one tensor.
    """

    def __init__(self, folder: Path, files: Files, read_header: ReadHeader = read_header) -> None:
        self._folder = folder
        self._unchecked = {name: entry for name, entry in files.items() if entry is not None}
        self._chunks = chunks_by_name(self._header_of(name, read_header) for name in files)
        for name, chunks in self._chunks.items():
            if len({(stored.dtype, len(stored.chunk.sizes)) for stored in chunks}) > 1:
                raise CheckpointError(f"{folder}: pieces of {name} are of different types")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor: as far as its chunks reach."""
        return {name: extent(stored.chunk for stored in chunks) for name, chunks in self._chunks.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's elements."""
        return self._chunks[name][0].dtype

    def files_of(self, name: str) -> list[str]:
        """The files that hold chunks of a tensor."""
        return [stored.file for stored in self._chunks[name]]

    def read(self, name: str, chunk: Chunk | None = None) -> torch.Tensor:
        """Reads a part of a tensor, by default all of it, into new memory on the CPU.

        Raises:
            CheckpointError: a file cannot be read or is not what was written, or an element is in none of them, or in
                two.
        """
        stored = self._chunks[name]
        chunk = Chunk.whole(extent(each.chunk for each in stored)) if chunk is None else chunk
        values = torch.empty(chunk.sizes, dtype=stored[0].dtype)
        reads = list(_reads_of(stored, chunk, values))
        for read in reads:
            self._read(read)
        found = sum(read.part.count for read in reads)
        if found != chunk.count:
            raise CheckpointError(
                f"{self._folder} holds {found:,} elements of {name} where it has {chunk.count:,}: a piece is missing, "
                "or there twice"
            )
        return values

    def _header_of(self, name: str, read_header: ReadHeader) -> Header:
        try:
            return _header_of(self._folder / name, read_header)
        except CheckpointError:
            self._check(name)  # what is wrong with the whole file says more
            raise

    def _check(self, name: str) -> None:
        """Compares a file with what was written, once."""
        entry = self._unchecked.pop(name, None)
        fault = file_fault(self._folder / name, entry) if entry is not None else None
        if fault is not None:
            raise CheckpointError(fault)

    def _read(self, read: ReadItem) -> None:
        path = self._folder / read.stored.file
        self._check(path.name)
        try:
            _read_file(path, [read], None)
        except OSError as error:
            raise CheckpointError(_cannot_be_read(path, error)) from None


def _header_of(path: Path, read_header: ReadHeader) -> Header:
    """Reads a header; an error of the file system becomes one for users."""
    try:
        return with_retries(lambda: read_header(path), f"reading {path}")
    except OSError as error:
        raise CheckpointError(_cannot_be_read(path, error)) from None


def chunks_by_name(headers: Iterable[Header]) -> dict[str, list[StoredChunk]]:
    """What files hold together: the chunks of each tensor."""
    chunks: dict[str, list[StoredChunk]] = {}
    for header in headers:
        for stored in header.chunks:
            chunks.setdefault(stored.name, []).append(stored)
    return chunks


def extent(chunks: Iterable[Chunk]) -> tuple[int, ...]:
    """The smallest shape that all chunks are inside of."""
    return tuple(map(max, zip(*(chunk.ends for chunk in chunks), strict=True)))


# All processes: every tensor in one pass


def load_tensors(
    folder: Path,
    files: Files,
    tensors: Mapping[str, torch.Tensor],
    *,
    read_header: ReadHeader = read_header,
    converts: bool = False,
) -> None:
    """Reads files into `tensors`, in place, whatever the layout that wrote them; a collective call.

    Args:
        files: all of them; those with size and checksum are compared, also where no tensor of them is asked for.
        tensors: the same names on every rank.
        converts: whether a tensor may be stored in another type.

    Raises:
        DamagedError: names every file that is not what was written; the tensors hold anything.
        CheckpointError: a tensor is missing, or of another shape or type.
    """
    try:
        headers = _read_headers(folder, sorted(files), read_header)
        results = gather_from_every_rank(lambda: _fill(folder, files, headers, tensors, converts))
    except CheckpointError:
        check_files(folder, files)  # a damaged header may seem to be of other tensors
        raise
    faults = [fault for _, faults in results for fault in faults]
    compared = {name for names, _ in results for name in names}
    faults += _faults(folder, {name: entry for name, entry in files.items() if name not in compared})
    if faults:
        raise DamagedError("; ".join(dict.fromkeys(faults)))  # several ranks may have read the same file


def check_files(folder: Path, files: Files) -> None:
    """Reads every file of a checkpoint, each rank a share, and compares with the manifest; a collective call.

    Raises:
        DamagedError: names every file whose content is not what was written.
    """
    if faults := _faults(folder, files):
        raise DamagedError("; ".join(faults))


def file_fault(path: Path, written: FileEntry) -> str | None:
    """Reads a file wholly, and says in what it is not what was written, if it is not."""
    try:
        found = with_retries(lambda: file_entry(path), f"reading {path}")
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return _cannot_be_read(path, error)
    return _content_fault(path, found, written)


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file as it is on disk."""
    checksum, size = file_checksum(path)
    return FileEntry(size, checksum)


def share_of_files(files: Mapping[str, FileEntry], rank: int, world_size: int) -> list[str]:
    """The files that a rank checks: about as many bytes for each, neighbours together."""
    total = max(1, sum(entry.bytes for entry in files.values()))
    own, before = [], 0
    for name in sorted(files):
        size = files[name].bytes
        if min((2 * before + size) * world_size // (2 * total), world_size - 1) == rank:  # where its middle lies
            own.append(name)
        before += size
    return own


def _faults(folder: Path, files: Files) -> list[str]:
    """What is wrong with files of known content, each read by one rank."""
    known = {name: entry for name, entry in files.items() if entry is not None}
    if not known:
        return []
    own = share_of_files(known, *_place())

    def check() -> list[str]:
        with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="verify") as pool:
            found = pool.map(lambda name: file_fault(folder / name, known[name]), own)
            return [fault for fault in found if fault]

    return [fault for of_rank in gather_from_every_rank(check) for fault in of_rank]


def _content_fault(path: Path, found: FileEntry, written: FileEntry) -> str | None:
    if found.bytes != written.bytes:
        return f"{path} has {found.bytes:,} bytes in place of {written.bytes:,}"
    if found.crc32 != written.crc32:
        return f"{path} is damaged: its checksum is {found.crc32} in place of {written.crc32}"
    return None


def _cannot_be_read(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror or error}"


def _read_headers(folder: Path, names: list[str], read_header: ReadHeader) -> dict[str, Header]:
    """What lies where in which file; each rank opens its share of the files and tells the others."""
    rank, world_size = _place()
    shares = gather_from_every_rank(
        lambda: {name: _header_of(folder / name, read_header) for name in names[rank::world_size]}
    )
    return {name: header for share in shares for name, header in share.items()}


def _fill(
    folder: Path, files: Files, headers: Mapping[str, Header], tensors: Mapping[str, torch.Tensor], converts: bool
) -> tuple[list[str], list[str]]:
    """Reads this rank's part of every tensor; returns the files that were compared, and the faults of those read."""
    reads = _plan(folder, headers, tensors, converts)
    whole = {name for name in reads if _is_whole(reads[name], headers[name], files[name])}

    def fault_of(name: str) -> str | None:
        path, entry = folder / name, files[name]
        begun = headers[name].crc32 if name in whole else None
        try:
            crc32 = with_retries(lambda: _read_file(path, reads[name], begun), f"reading {path}")
        except OSError as error:
            return _cannot_be_read(path, error)
        if entry is None or crc32 is None:
            return None
        return _content_fault(path, FileEntry(entry.bytes, crc32_text(crc32)), entry)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="restore") as pool:
        return sorted(whole), [fault for fault in pool.map(fault_of, reads) if fault]


def _plan(
    folder: Path, headers: Mapping[str, Header], tensors: Mapping[str, torch.Tensor], converts: bool
) -> dict[str, list[ReadItem]]:
    """What this rank needs of each file, in the order in which it lies there."""
    stored = chunks_by_name(headers.values())
    reads: dict[str, list[ReadItem]] = {}
    for name, tensor in tensors.items():
        chunks = stored.get(name, [])
        _check_fits(folder, name, chunks, tensor, converts)
        for read in _reads_of(chunks, local_chunk(tensor), local_tensor(tensor)):
            reads.setdefault(read.stored.file, []).append(read)
    return {name: sorted(of_file, key=lambda read: read.stored.begin) for name, of_file in reads.items()}


def _check_fits(folder: Path, name: str, chunks: Sequence[StoredChunk], tensor: torch.Tensor, converts: bool) -> None:
    held: dict[tuple[torch.dtype, int], int] = {}
    for stored in chunks:
        kind = tensor.dtype if converts else stored.dtype, len(stored.chunk.sizes)
        held[kind] = held.get(kind, 0) + stored.chunk.count
    needed = {(tensor.dtype, tensor.dim()): tensor.numel()}
    if held != needed:
        raise CheckpointError(
            f"{folder} cannot be loaded: of {name} it holds {_words(held)}, and {_words(needed)} are needed"
        )
    shape = extent(stored.chunk for stored in chunks)
    if shape != tuple(tensor.shape):
        raise CheckpointError(f"{folder}: {name} cannot be loaded: it has the shape {shape}, not {tuple(tensor.shape)}")


def _words(counts: Mapping[tuple[torch.dtype, int], int]) -> str:
    return ", ".join(f"{count} x {dtype} in {dims} dims" for (dtype, dims), count in counts.items()) or "nothing"


def _is_whole(reads: Iterable[ReadItem], header: Header, entry: FileEntry | None) -> bool:
    """Whether header and reads, one after the other, are all of a file whose checksum is known."""
    if entry is None or header.crc32 is None:
        return False
    end = header.bytes
    for read in reads:
        if read.part != read.stored.chunk or read.stored.begin != end:
            return False
        end += _bytes_of(read.stored)
    return end == entry.bytes


def _place() -> tuple[int, int]:
    """Rank and number of processes; one alone has joined no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# From the disk into memory


@dataclass(frozen=True)
class ReadItem:
    """A part of a stored chunk, and the memory that it goes to."""

    stored: StoredChunk
    part: Chunk
    target: torch.Tensor


def _reads_of(chunks: Iterable[StoredChunk], wanted: Chunk, values: torch.Tensor) -> Iterator[ReadItem]:
    """What to read for the values of a part of a tensor."""
    for stored in chunks:
        part = wanted.overlap(stored.chunk)
        if part is not None:
            target = values
            for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                target = target.narrow(dim, begin - wanted.offsets[dim], size)
            yield ReadItem(stored, part, target)


def _read_file(path: Path, reads: Iterable[ReadItem], crc32: int | None) -> int | None:
    """Reads parts of a file, in order; goes on with the checksum of what stands before them, if there is one."""
    with path.open("rb", buffering=0) as file:
        for read in reads:
            crc32 = read_chunk(file.fileno(), read, crc32)
    return crc32


def read_chunk(descriptor: int, read: ReadItem, crc32: int | None = None) -> int | None:
    """Reads a part of a stored chunk into its place; the type is converted.

    Args:
        crc32: of the file up to the part, which is then the whole chunk; None = do not compute one.

    Returns:
        The checksum of the file up to the end of the chunk.

    Raises:
        CheckpointError: the file ends early.
    """
    stored, part, target = read.stored, read.part, read.target
    offsets = [wanted - begin for wanted, begin in zip(part.offsets, stored.chunk.offsets, strict=True)]
    row = prod(stored.chunk.sizes[1:]) * stored.dtype.itemsize
    begin = stored.begin + (offsets[0] if offsets else 0) * row
    is_whole_rows = part.sizes[1:] == stored.chunk.sizes[1:]
    if is_whole_rows and target.is_cpu and target.is_contiguous() and target.dtype == stored.dtype:
        return _read_all(descriptor, begin, memory_of(target), stored, crc32)
    sizes = (*part.sizes[:1], *stored.chunk.sizes[1:])
    rows = torch.empty(sizes, dtype=stored.dtype, pin_memory=target.is_cuda)
    crc32 = _read_all(descriptor, begin, memory_of(rows), stored, crc32)
    for dim in range(1, len(offsets)):
        rows = rows.narrow(dim, offsets[dim], part.sizes[dim])
    target.copy_(rows)
    return crc32


def _read_all(descriptor: int, begin: int, content: memoryview, stored: StoredChunk, crc32: int | None) -> int | None:
    while content:
        buffer = content if crc32 is None else content[:CHUNK_BYTES]
        count = os.preadv(descriptor, [buffer], begin)
        if count == 0:
            raise CheckpointError(f"{stored.file} ends in the middle of {stored.name}")
        if crc32 is not None:
            crc32 = zlib.crc32(buffer[:count], crc32)
        begin += count
        content = content[count:]
    return crc32
