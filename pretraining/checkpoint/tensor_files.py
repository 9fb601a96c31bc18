"""Files of tensors: written with a checksum on the way, checked, and read into place.

    8 bytes: length of the header  |  header, JSON  |  the tensors' bytes, one after the other

This is the safetensors format, with the offsets of sharded tensors noted as torch's own HuggingFaceStorageWriter notes
them; so torch's reader reads these files too. Tensors go from their memory to the file and back without being put
together in between. A file holds numbers and JSON: reading one cannot execute anything.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.layout import Box, Piece
from pretraining.checkpoint.state import FileEntry, crc32_text
from pretraining.errors import CheckpointError

SUFFIX = ".safetensors"
CHUNK_BYTES = 2**20  # fits a core's cache: what was just read or checked is copied from there, not from memory
LARGEST_HEADER_BYTES = 10**8

_DTYPES = {
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
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class StoredPiece:
    """A part of a tensor in a file.

    Attributes:
        name: of the tensor.
        dtype: of its elements.
        box: which part.
        file: name of the file.
        begin: byte of the file at which it starts.
    """

    name: str
    dtype: torch.dtype
    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class Header:
    """What stands before the tensors of a file.

    Attributes:
        pieces: what the file holds.
        bytes: its length; the first tensor begins behind it.
        crc32: of these bytes; goes on with what follows.
    """

    pieces: list[StoredPiece]
    bytes: int
    crc32: int


def write_tensors(path: Path, pieces: Sequence[Piece]) -> FileEntry:
    """Write a file, flushed to disk; what was there before is replaced.

    Args:
        path: of the file.
        pieces: what goes into it.

    Returns:
        Size and checksum of what was written, computed from memory, not read back.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    ordered = sorted(pieces, key=lambda piece: (-piece.values.element_size(), piece.name))
    size = checksum = 0
    with path.open("wb", buffering=0) as file:
        for chunk in _chunks(ordered):
            checksum = zlib.crc32(chunk, checksum)
            _write_all(file.fileno(), chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return FileEntry(size, crc32_text(checksum))


def checksum_file(path: Path) -> FileEntry:
    """Size and checksum of a file as it is on disk.

    Raises:
        OSError: it cannot be read.
    """
    size = checksum = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
            size += count
    return FileEntry(size, crc32_text(checksum))


def read_header(path: Path) -> Header:
    """What a file holds.

    Raises:
        CheckpointError: it is no file of this format.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(end - 8, LARGEST_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file")
        content = file.read(length)
    try:
        header = json.loads(content)
        offsets = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
        pieces = [
            _stored_piece(path.name, name, entry, offsets.get(name), 8 + length, end) for name, entry in header.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a header that makes no sense ({error})") from None
    return Header(pieces, 8 + length, zlib.crc32(content, zlib.crc32(prefix)))


def read_piece(
    descriptor: int, piece: StoredPiece, part: Box, target: torch.Tensor, crc32: int | None = None
) -> int | None:
    """Read a part of a stored piece.

    Args:
        descriptor: of the open file.
        piece: in it.
        part: of the tensor, inside the piece.
        target: of the part's shape and the piece's dtype; filled.
        crc32: of the file up to the part, which is the whole piece; None = do not compute one.

    Returns:
        The checksum of the file up to the end of the piece.

    Raises:
        CheckpointError: the file ends early.
        OSError: it cannot be read.
    """
    offsets = [wanted - begin for wanted, begin in zip(part.offsets, piece.box.offsets, strict=True)]
    row = prod(piece.box.sizes[1:]) * piece.dtype.itemsize
    first = offsets[0] if offsets else 0
    is_whole_rows = part.sizes[1:] == piece.box.sizes[1:]
    if is_whole_rows and target.is_cpu and target.is_contiguous():
        return _read_all(descriptor, piece.begin + first * row, _bytes_of(target), piece, crc32)
    rows = torch.empty((*part.sizes[:1], *piece.box.sizes[1:]), dtype=piece.dtype, pin_memory=target.is_cuda)
    crc32 = _read_all(descriptor, piece.begin + first * row, _bytes_of(rows), piece, crc32)
    for dim in range(1, len(offsets)):
        rows = rows.narrow(dim, offsets[dim], part.sizes[dim])
    target.copy_(rows)
    return crc32


def _stored_piece(
    file: str, name: str, entry: dict[str, Any], offsets: dict[str, Any] | None, data_begin: int, file_end: int
) -> StoredPiece:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = (data_begin + offset for offset in entry["data_offsets"])
    saved = tuple(offsets["saved_offsets"]) if offsets is not None else (0,) * len(shape)
    if (
        len(saved) != len(shape)
        or not all(isinstance(number, int) and number >= 0 for number in (*shape, *saved, begin, end))
        or end - begin != prod(shape) * dtype.itemsize
        or not data_begin <= begin <= end <= file_end
    ):
        raise ValueError(f"tensor {name}")
    return StoredPiece(name, dtype, Box(saved, shape), file, begin)


def _chunks(pieces: Sequence[Piece]) -> Iterator[memoryview]:
    """The bytes of a file, in order; small pieces are joined, since each write is a turn that threads wait for."""
    small = [memoryview(_header(pieces))]
    for piece in pieces:
        content = _bytes_of(piece.values.cpu().contiguous())
        if len(content) < CHUNK_BYTES:
            small.append(content)
            if sum(map(len, small)) >= CHUNK_BYTES:
                yield memoryview(b"".join(small))
                small.clear()
            continue
        if small:
            yield memoryview(b"".join(small))
            small.clear()
        for begin in range(0, len(content), CHUNK_BYTES):
            yield content[begin : begin + CHUNK_BYTES]
    yield memoryview(b"".join(small))


def _header(pieces: Sequence[Piece]) -> bytes:
    offsets = {piece.name: {"saved_offsets": piece.box.offsets} for piece in pieces}
    header: dict[str, Any] = {
        "__metadata__": {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    }
    begin = 0
    for piece in pieces:
        end = begin + piece.box.count * piece.values.element_size()
        dtype = _DTYPE_NAMES[piece.values.dtype]
        header[piece.name] = {"dtype": dtype, "shape": piece.box.sizes, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, content: memoryview) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _read_all(descriptor: int, begin: int, content: memoryview, piece: StoredPiece, crc32: int | None) -> int | None:
    while content:
        chunk = content if crc32 is None else content[:CHUNK_BYTES]
        count = os.preadv(descriptor, [chunk], begin)
        if count == 0:
            raise CheckpointError(f"{piece.file} ends in the middle of {piece.name}")
        if crc32 is not None:
            crc32 = zlib.crc32(chunk[:count], crc32)
        begin += count
        content = content[count:]
    return crc32
