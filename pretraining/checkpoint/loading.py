"""How a checkpoint is read back: each byte is compared with what was written, most of them on the way into the tensors.

    headers, each rank a share          -> which rank needs which parts of which file
    what a rank needs wholly            -> read by it once: the checksum is computed while the bytes are copied
    files that no rank needs wholly     -> read by one rank more, for their checksums alone
    what every rank has found           -> told to all, before any of them uses a tensor

With the layout that wrote the checkpoint every file is needed wholly. Reading takes safetensors and JSON only: nothing
in a checkpoint is ever executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from pretraining.checkpoint.layout import Box, local_box, local_tensor
from pretraining.checkpoint.sources import content_fault, inside
from pretraining.checkpoint.state import FileEntry, crc32_text
from pretraining.checkpoint.tensor_files import Header, StoredPiece, checksum_file, read_header, read_piece
from pretraining.distributed.processes import gather_from_every_rank
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import with_retries

READING_THREADS = 4

Files = Mapping[str, FileEntry]


@dataclass(frozen=True)
class _Read:
    """A part of a stored piece, and the memory that it goes to."""

    piece: StoredPiece
    part: Box
    target: torch.Tensor


def load_tensors(folder: Path, files: Files, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read a checkpoint into `tensors`, in place, whatever the layout that wrote it; a collective call.

    Tensors of the checkpoint that are not asked for are not kept, but their files are compared, too.

    Args:
        folder: of the checkpoint.
        files: all of them, as its manifest names them.
        tensors: the same names on every rank.

    Raises:
        DamagedError: names every file that is not what was written; the tensors hold anything.
        CheckpointError: a tensor is missing, or of another shape or type.
    """
    try:
        headers = _read_headers(folder, sorted(files))
        results = gather_from_every_rank(lambda: _fill(folder, files, headers, tensors))
    except CheckpointError:
        check_files(folder, files)  # a damaged header may seem to be of other tensors
        raise
    faults = [fault for _, faults in results for fault in faults]
    compared = {name for names, _ in results for name in names}
    faults += _faults(folder, {name: entry for name, entry in files.items() if name not in compared})
    if faults:
        raise DamagedError("; ".join(dict.fromkeys(faults)))  # several ranks may have read the same file


def check_files(folder: Path, files: Files) -> None:
    """Read every file of a checkpoint, each rank a share, and compare with the manifest; a collective call.

    Raises:
        DamagedError: names every file whose content is not what was written.
    """
    faults = _faults(folder, files)
    if faults:
        raise DamagedError("; ".join(faults))


def share_of_files(files: Files, rank: int, world_size: int) -> list[str]:
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
    """What is wrong with files, each read by one rank."""
    if not files:
        return []
    own = share_of_files(files, *_place())

    def check() -> list[str]:
        with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="verify") as pool:
            found = pool.map(lambda name: _fault_of(folder / name, files[name], checksum_file), own)
            return [fault for fault in found if fault]

    return [fault for of_rank in gather_from_every_rank(check) for fault in of_rank]


def _read_headers(folder: Path, names: list[str]) -> dict[str, Header]:
    """What lies where in which file; each rank opens its share of the files and tells the others."""
    rank, world_size = _place()

    def read(name: str) -> Header:
        path = folder / name
        try:
            return with_retries(lambda: read_header(path), f"reading {path}")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    shares = gather_from_every_rank(lambda: {name: read(name) for name in names[rank::world_size]})
    return {name: header for share in shares for name, header in share.items()}


def _fill(
    folder: Path, files: Files, headers: Mapping[str, Header], tensors: Mapping[str, torch.Tensor]
) -> tuple[list[str], list[str]]:
    """Read this rank's part of every tensor.

    Returns:
        The files that were read wholly, and what is wrong with those that were read.
    """
    reads = _plan(folder, headers, tensors)
    whole = {name for name in reads if _is_whole(reads[name], headers[name], files[name])}

    def fault_of(name: str) -> str | None:
        entry = files[name]

        def read(path: Path) -> FileEntry:
            found = _read_file(path, reads[name], headers[name].crc32 if name in whole else None)
            return entry if found is None else FileEntry(entry.bytes, crc32_text(found))

        return _fault_of(folder / name, entry, read)

    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="restore") as pool:
        return sorted(whole), [fault for fault in pool.map(fault_of, reads) if fault]


def _plan(folder: Path, headers: Mapping[str, Header], tensors: Mapping[str, torch.Tensor]) -> dict[str, list[_Read]]:
    """What this rank needs of each file, in the order in which it lies there."""
    stored: dict[str, list[StoredPiece]] = {}
    for header in headers.values():
        for piece in header.pieces:
            stored.setdefault(piece.name, []).append(piece)
    reads: dict[str, list[_Read]] = {}
    for name, tensor in tensors.items():
        pieces = stored.get(name, [])
        held, needed = _extent(pieces), {(tensor.dtype, tensor.dim()): tensor.numel()}
        if held != needed:
            raise CheckpointError(
                f"{folder} cannot be loaded: of {name} it holds {_words(held)}, and {_words(needed)} are needed"
            )
        here, values = local_box(tensor), local_tensor(tensor)
        for piece in pieces:
            part = here.overlap(piece.box)
            if part is not None:
                reads.setdefault(piece.file, []).append(_Read(piece, part, inside(values, here, part)))
    return {name: sorted(of_file, key=lambda read: read.piece.begin) for name, of_file in reads.items()}


def _is_whole(reads: Iterable[_Read], header: Header, entry: FileEntry) -> bool:
    """Whether header and reads, one after the other, are all of a file."""
    end = header.bytes
    for read in reads:
        if read.part != read.piece.box or read.piece.begin != end:
            return False
        end += read.part.count * read.piece.dtype.itemsize
    return end == entry.bytes


def _read_file(path: Path, reads: Iterable[_Read], crc32: int | None) -> int | None:
    with path.open("rb", buffering=0) as file:
        for read in reads:
            crc32 = read_piece(file.fileno(), read.piece, read.part, read.target, crc32)
    return crc32


def _fault_of(path: Path, entry: FileEntry, read: Callable[[Path], FileEntry]) -> str | None:
    """What is wrong with a file, if anything."""
    try:
        found = with_retries(lambda: read(path), f"reading {path}")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return content_fault(path, found, entry)


def _extent(pieces: Iterable[StoredPiece]) -> dict[tuple[torch.dtype, int], int]:
    """Elements of a tensor that are stored, by type and number of dims."""
    counts: dict[tuple[torch.dtype, int], int] = {}
    for piece in pieces:
        kind = piece.dtype, len(piece.box.sizes)
        counts[kind] = counts.get(kind, 0) + piece.box.count
    return counts


def _words(counts: Mapping[tuple[torch.dtype, int], int]) -> str:
    return ", ".join(f"{count} x {dtype} in {dims} dims" for (dtype, dims), count in counts.items()) or "nothing"


def _place() -> tuple[int, int]:
    """Rank and number of processes; one alone has joined no others."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
