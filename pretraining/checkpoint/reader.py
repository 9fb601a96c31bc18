"""How tensors are read back from files, whatever the form of the files and the layout that wrote them.

    files  -> `headers`: which chunk of which tensor begins at which byte
    a wish -> the stored chunks that overlap with it -> `read_chunk`: from the disk into the tensor's memory

`TensorFiles` reads any part of any tensor in one process, one tensor at a time. `load_tensors` fills the tensors of all
ranks in one pass, and compares each byte with what was written:

    headers, each rank a share          -> which rank needs which parts of which file
    what a rank needs wholly            -> read by it once: the checksum is computed while the bytes are copied
    files that no rank needs wholly     -> read by one rank more, for their checksums alone
    what every rank has found           -> told to all, before any of them uses a tensor

With the layout that wrote the checkpoint every file is needed wholly.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.completeness import tensor_faults
from pretraining.checkpoint.headers import Header, StoredChunk, chunks_by_name, extent, read_header, reading
from pretraining.checkpoint.manifest import MODEL_FILE, FileEntry, Manifest, crc32_text, size_fault
from pretraining.checkpoint.writer import CHUNK_BYTES, Chunk, local_chunk, local_tensor, memory_of
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.distributed.torch_private import free_pinned_memory
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import file_checksum
from pretraining.text import list_some

READING_THREADS = 4
BUFFER_BYTES = 2**26
"""Of each thread, for what is converted, cut or sent to a device on its way."""
FAULTS_SHOWN = 3

Files = Mapping[str, FileEntry | None]
"""Names of a folder's files, and where they are known, size and checksum."""


# One process: any part of any tensor


class TensorFiles:
    """Tensors in the files of a folder, whole or in chunks.

    Args:
        files: a file whose size and checksum are known is compared with them before the first chunk is taken from it.

    Attributes:
        chunks: of each tensor, all of one type and number of dims.

    Raises:
        CheckpointError: a file cannot be read, or chunks of one name are not of one tensor.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._unchecked = {name: entry for name, entry in files.items() if entry is not None}
        self.chunks = chunks_by_name(map(self._header_of, files))
        for name, chunks in self.chunks.items():
            if len({(stored.dtype, len(stored.chunk.sizes)) for stored in chunks}) > 1:
                raise CheckpointError(f"pieces of {name} are of different types", path=folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor: as far as its chunks reach."""
        return {name: extent(stored.chunk for stored in chunks) for name, chunks in self.chunks.items()}

    def read(self, name: str, chunk: Chunk | None = None) -> torch.Tensor:
        """Reads a part of a tensor, by default all of it, into new memory on the CPU.

        Raises:
            CheckpointError: a file cannot be read or is not what was written, or an element is in none of them, or in
                two.
        """
        stored = self.chunks[name]
        chunk = Chunk.whole(extent(each.chunk for each in stored)) if chunk is None else chunk
        values = torch.empty(chunk.sizes, dtype=stored[0].dtype)
        reads = list(_reads_of(stored, chunk, values))
        for read in reads:
            self._check(read.stored.file)
            _read_file(self._folder / read.stored.file, [read])
        found = sum(read.part.count for read in reads)
        if found != chunk.count:
            raise CheckpointError(
                f"holds {found:,} elements of {name} where it has {chunk.count:,}: a piece is missing, or there twice",
                path=self._folder,
            )
        return values

    def _header_of(self, name: str) -> Header:
        try:
            return read_header(self._folder / name)
        except CheckpointError:
            self._check(name)  # what is wrong with the whole file says more
            raise

    def _check(self, name: str) -> None:
        """Compares a file with what was written, the first time."""
        entry = self._unchecked.pop(name, None)
        fault = file_fault(self._folder / name, entry) if entry is not None else None
        if fault is not None:
            raise CheckpointError(fault)


# All processes: every tensor in one pass


def load_tensors(
    folder: Path, files: Files, tensors: Mapping[str, torch.Tensor], manifest: Manifest | None = None
) -> None:
    """Reads files into `tensors`, in place, whatever the layout that wrote them; a collective call.

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
        headers = _read_headers(folder, sorted(files))
        if manifest is not None:
            _check_complete(folder, headers, manifest)
        results = gather_from_every_rank(lambda: _fill(folder, files, headers, tensors))
    except CheckpointError:
        check_files(folder, files)  # a damaged header may seem to be of other tensors
        raise
    compared = {name for of_rank in results for name in of_rank}
    # Several ranks may have read the same file, and one of them alone what was not written.
    faults = dict.fromkeys(fault for of_rank in results for fault in of_rank.values() if fault is not None)
    check_files(folder, {name: entry for name, entry in files.items() if name not in compared}, faults)


def _check_complete(folder: Path, headers: Mapping[str, Header], manifest: Manifest) -> None:
    """Refuses files that do not hold each tensor of a model once, with a DamagedError; a collective call."""
    stored = chunks_by_name(headers[name] for name in sorted(headers))
    shares = gather_from_every_rank(lambda: tensor_faults(folder, stored, manifest, *_place()))
    faults = [fault for share in shares for fault in share]
    if faults:
        hint = f": `pretrain verify {folder}`" if len(faults) > FAULTS_SHOWN else ""
        raise DamagedError(list_some(faults, FAULTS_SHOWN, "; ") + hint)


def check_files(folder: Path, files: Files, faults: Iterable[str] = ()) -> None:
    """Reads every file of known content, each rank a share, and compares with the manifest; a collective call.

    Args:
        faults: what is known to be wrong with other files, the same on every rank.

    Raises:
        DamagedError: names every file whose content is not what was written.
    """
    known = {name: entry for name, entry in files.items() if entry is not None}
    found = []
    if known:
        own = share_of_files(known, *_place())
        found = gather_from_every_rank(lambda: file_faults(folder, own, READING_THREADS))
    faults = [*faults, *(fault for of_rank in found for fault in of_rank)]
    if faults:
        raise DamagedError("; ".join(faults))


def file_faults(folder: Path, files: Mapping[str, FileEntry], threads: int) -> list[str]:
    """Reads files wholly, and says in what they are not what was written."""
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        faults = pool.map(lambda name: file_fault(folder / name, files[name]), files)
        return [fault for fault in faults if fault]


def file_fault(path: Path, written: FileEntry) -> str | None:
    """Reads a file wholly, and says in what it is not what was written, if it is not."""
    try:
        return size_fault(path, written) or _checksum_fault(path, reading(path, file_entry).crc32, written)
    except CheckpointError as error:
        return str(error)


def file_entry(path: Path) -> FileEntry:
    """Size and checksum of a file as it is on disk."""
    checksum, size = file_checksum(path)
    return FileEntry(size, checksum)


def _checksum_fault(path: Path, crc32: str, written: FileEntry) -> str | None:
    if crc32 == written.crc32:
        return None
    return f"{path} is damaged: its checksum is {crc32} in place of {written.crc32}"


def share_of_files(files: Mapping[str, FileEntry], rank: int, world_size: int) -> dict[str, FileEntry]:
    """The files that a rank checks: about as many bytes for each, neighbours together."""
    total = max(1, sum(entry.bytes for entry in files.values()))
    own, before = {}, 0
    for name in sorted(files):
        size = files[name].bytes
        if min((2 * before + size) * world_size // (2 * total), world_size - 1) == rank:  # where its middle lies
            own[name] = files[name]
        before += size
    return own


def _read_headers(folder: Path, names: list[str]) -> dict[str, Header]:
    """What lies where in which file; each rank opens its share of the files and tells the others."""
    rank, world_size = _place()
    shares = gather_from_every_rank(lambda: {name: read_header(folder / name) for name in names[rank::world_size]})
    return {name: header for share in shares for name, header in share.items()}


def _place() -> tuple[int, int]:
    """Rank and number of processes; one alone has joined no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _fill(
    folder: Path, files: Files, headers: Mapping[str, Header], tensors: Mapping[str, torch.Tensor]
) -> dict[str, str | None]:
    """Reads this rank's part of every tensor; returns what is wrong, if anything, with each file that was compared."""
    stored = chunks_by_name(headers.values())
    converts = MODEL_FILE in files or None in files.values()
    reads: dict[str, list[ReadItem]] = {}
    for name, tensor in tensors.items():
        chunks = stored.get(name, [])
        _check_fits(folder, name, chunks, tensor, converts)
        for read in _reads_of(chunks, local_chunk(tensor), local_tensor(tensor)):
            reads.setdefault(read.stored.file, []).append(read)

    def fault_of(name: str) -> tuple[bool, str | None]:
        """Reads what is needed of a file; whether that was all of it, and what is wrong then."""
        path, entry = folder / name, files[name]
        in_order = sorted(reads[name], key=lambda read: read.stored.begin)
        if entry is None or not _is_whole(in_order, headers[name], entry):
            _read_file(path, in_order)
            return False, None
        crc32 = _read_file(path, in_order, headers[name].crc32)
        assert crc32 is not None
        return True, _checksum_fault(path, crc32_text(crc32), entry)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="restore") as pool:
        results = dict(zip(reads, pool.map(fault_of, reads), strict=True))
    free_pinned_memory()
    return {name: fault for name, (compared, fault) in results.items() if compared}


def _check_fits(folder: Path, name: str, chunks: Sequence[StoredChunk], tensor: torch.Tensor, converts: bool) -> None:
    held: dict[tuple[torch.dtype, int], int] = {}
    for stored in chunks:
        is_converted = converts and stored.dtype.is_floating_point and tensor.dtype.is_floating_point
        kind = tensor.dtype if is_converted else stored.dtype, len(stored.chunk.sizes)
        held[kind] = held.get(kind, 0) + stored.chunk.count
    needed = {(tensor.dtype, tensor.dim()): tensor.numel()}
    if held != needed:
        raise CheckpointError(
            f"cannot be loaded: of {name} it holds {_words(held)}, and {_words(needed)} are needed", path=folder
        )
    shape = extent(stored.chunk for stored in chunks)
    if shape != tuple(tensor.shape):
        raise CheckpointError(
            f"{name} cannot be loaded: it has the shape {shape}, not {tuple(tensor.shape)}", path=folder
        )


def _words(counts: Mapping[tuple[torch.dtype, int], int]) -> str:
    return ", ".join(f"{count} x {dtype} in {dims} dims" for (dtype, dims), count in counts.items()) or "nothing"


def _is_whole(reads: Iterable[ReadItem], header: Header, entry: FileEntry) -> bool:
    """Whether header and reads, one after the other, are all of a file."""
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


def _reads_of(chunks: Iterable[StoredChunk], wanted: Chunk, values: torch.Tensor) -> Iterator[ReadItem]:
    """What to read for the values of a part of a tensor."""
    for stored in chunks:
        part = wanted.overlap(stored.chunk)
        if part is not None:
            target = values
            for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                target = target.narrow(dim, begin - wanted.offsets[dim], size)
            yield ReadItem(stored, part, target)


def _read_file(path: Path, reads: Iterable[ReadItem], begun: int | None = None) -> int | None:
    """Reads parts of a file, in order; goes on with the checksum of what stands before them, if there is one."""

    def read(path: Path) -> int | None:
        crc32 = begun
        with path.open("rb", buffering=0) as file:
            for item in reads:
                crc32 = read_chunk(file.fileno(), item, crc32)
        return crc32

    return reading(path, read)


def read_chunk(descriptor: int, read: ReadItem, crc32: int | None = None) -> int | None:
    """Reads a part of a stored chunk into its place and converts it; a CheckpointError if the file ends early.

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
