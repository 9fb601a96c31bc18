"""Where the record batches of an Arrow IPC file are, and the numbers in their metadata.

Formats are those of the Arrow specification, "IPC File Format" and "Serialization and Interprocess Communication", and
of FlatBuffers' tables. Whatever points outside the file raises struct.error or IndexError: the caller says that it is
damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from pretraining.errors import DataError

MAGIC = b"ARROW1"
NUMBERS = (
    "rows",
    "null_rows",
    "null_tokens",
    "validity_at",
    "offsets_at",
    "offsets_bytes",
    "tokens_at",
    "tokens_bytes",
)
"""What is read from a record batch's metadata, in this order. Positions count from the start of the batch's body."""

_BATCHES_AT_ONCE = 4096
_BLOCK = np.dtype([("offset", "<i8"), ("metadata_bytes", "<i4"), ("_", "<i4"), ("body_bytes", "<i8")])


@dataclass(frozen=True)
class ColumnPlace:
    """Where the column's parts stand in the metadata of a record batch, and how wide its numbers are."""

    node: int
    buffer: int
    offset_bytes: int
    width: int


def read_footer(path: str, content: np.ndarray) -> bytes:
    """The file's footer, a FlatBuffer."""
    tail = content[-10:].tobytes()
    if tail[4:] != MAGIC:
        if content[:4].tobytes() == b"\xff\xff\xff\xff":
            raise DataError(f"{path} is an Arrow stream, which has no table of its rows: write it as an Arrow IPC file")
        raise DataError(f"{path} is truncated or damaged: it does not end as an Arrow file does")
    (length,) = struct.unpack_from("<i", tail)
    if not 0 < length <= len(content) - 10 - len(MAGIC):
        raise DataError(f"{path} is damaged: its footer says that it is {length} bytes long")
    return content[-10 - length : -10].tobytes()


def record_batches(path: str, content: np.ndarray, footer: bytes) -> np.ndarray:
    """The positions of the record batches, [batches] `_BLOCK`."""
    root = _follow(footer, 0)
    schema = _field(footer, root, 1)
    endianness = None if schema is None else _field(footer, _follow(footer, schema), 0)
    if endianness is not None and struct.unpack_from("<h", footer, endianness)[0] != 0:
        raise DataError(f"{path} was written in big-endian order: write it anew on a little-endian machine")
    field = _field(footer, root, 3)
    if field is None:
        return np.zeros(0, dtype=_BLOCK)
    vector = _follow(footer, field)
    (count,) = struct.unpack_from("<I", footer, vector)
    if vector + 4 + count * _BLOCK.itemsize > len(footer):
        raise IndexError
    blocks = np.frombuffer(footer, dtype=_BLOCK, count=count, offset=vector + 4)
    offset, metadata_bytes, body_bytes = blocks["offset"], blocks["metadata_bytes"], blocks["body_bytes"]
    wrong = (offset < 0) | (metadata_bytes < 8) | (body_bytes < 0) | (body_bytes > len(content))
    if (wrong | (offset > len(content) - metadata_bytes - body_bytes)).any():
        raise IndexError
    return blocks


def batch_numbers(path: str, content: np.ndarray, blocks: np.ndarray, place: ColumnPlace) -> np.ndarray:
    """Read `NUMBERS` from the metadata of every record batch, [batches, len(NUMBERS)] int64."""
    numbers = np.zeros((len(blocks), len(NUMBERS)), dtype=np.int64)
    if len(blocks) == 0:
        return numbers
    first = _metadata(content, blocks[0])
    positions, free = _positions(path, first, place)
    numbers[0] = _read(first, positions)
    fixed = np.ones(len(first), dtype=bool)
    for begin, end in free:
        fixed[begin:end] = False
    expected = np.frombuffer(first, dtype=np.uint8)[fixed]
    for begin in range(1, len(blocks), _BATCHES_AT_ONCE):
        chunk = np.arange(begin, min(begin + _BATCHES_AT_ONCE, len(blocks)))
        alike = chunk[blocks["metadata_bytes"][chunk] == len(first)]
        # batches L (bytes of metadata)
        metadata = content[blocks["offset"][alike][:, None] + np.arange(len(first))]
        same = (metadata[:, fixed] == expected).all(axis=1)
        alike, metadata = alike[same], metadata[same]
        for number, at in enumerate(positions):
            numbers[alike, number] = np.ascontiguousarray(metadata[:, at : at + 8]).view("<i8")[:, 0]
        for batch in np.setdiff1d(chunk, alike, assume_unique=True):
            single = _metadata(content, blocks[batch])
            numbers[batch] = _read(single, _positions(path, single, place)[0])
    return numbers


def _metadata(content: np.ndarray, block: np.ndarray) -> bytes:
    return content[block["offset"] : block["offset"] + block["metadata_bytes"]].tobytes()


def _read(metadata: bytes, positions: list[int]) -> list[int]:
    return [struct.unpack_from("<q", metadata, at)[0] for at in positions]


def _positions(path: str, metadata: bytes, place: ColumnPlace) -> tuple[list[int], list[tuple[int, int]]]:
    """Parse a record batch's metadata: where `NUMBERS` stand in it, and all ranges of bytes that are plain numbers."""
    begin = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4  # format V4 has no continuation marker
    message = _follow(metadata, begin)
    header = _field(metadata, message, 2)
    kind = _field(metadata, message, 1)
    if header is None or kind is None or metadata[kind] != 3:
        raise DataError(f"{path} is damaged: where its footer has a record batch is something else")
    batch = _follow(metadata, header)
    if _field(metadata, batch, 3) is not None:
        raise DataError(f"{path} is compressed, so its documents cannot be read in place: write it without compression")
    nodes_field, buffers_field = _field(metadata, batch, 1), _field(metadata, batch, 2)
    if nodes_field is None or buffers_field is None:
        raise IndexError
    nodes, buffers = _follow(metadata, nodes_field), _follow(metadata, buffers_field)
    node_count, buffer_count = (struct.unpack_from("<I", metadata, vector)[0] for vector in (nodes, buffers))
    if node_count < place.node + 2 or buffer_count < place.buffer + 4:
        raise IndexError
    nodes, buffers = nodes + 4, buffers + 4
    free = [(nodes, nodes + 16 * node_count), (buffers, buffers + 16 * buffer_count)]
    free += [(at, at + 8) for at in (_field(metadata, message, 3), _field(metadata, batch, 0)) if at is not None]
    node, buffer = nodes + 16 * place.node, buffers + 16 * place.buffer
    # A node is (length, nulls), a buffer (offset, length).
    # A list has nodes (list, values) and buffers (list's validity, list offsets, values' validity, values).
    return [node, node + 8, node + 24, buffer, buffer + 16, buffer + 24, buffer + 48, buffer + 56], free


def _follow(buffer: bytes, at: int) -> int:
    """The position that a FlatBuffer's reference points to."""
    return at + struct.unpack_from("<I", buffer, at)[0]


def _field(buffer: bytes, table: int, number: int) -> int | None:
    """The position of a field of a FlatBuffer's table; None where it is left out and so has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise IndexError
    (vtable_bytes,) = struct.unpack_from("<H", buffer, vtable)
    if 4 + 2 * number >= vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + 4 + 2 * number)
    return table + offset if offset else None
