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
FLAT_NUMBERS = ("tokens", "null_tokens", "tokens_at", "tokens_bytes")
LIST_NUMBERS = (
    "rows",
    "null_rows",
    "null_tokens",
    "validity_at",
    "offsets_at",
    "offsets_bytes",
    "tokens_at",
    "tokens_bytes",
)
"""What is read from a record batch's metadata, in this order, where the column is of plain integers and where it is of
lists. Positions count from the start of the batch's body."""

_BATCHES_AT_ONCE = 4096
_BLOCK = np.dtype([("offset", "<i8"), ("metadata_bytes", "<i4"), ("_", "<i4"), ("body_bytes", "<i8")])


@dataclass(frozen=True)
class ColumnPlace:
    """Where the column's parts stand in the metadata of a record batch, and how wide its numbers are.

    Attributes:
        node, buffer: number of the column's first field node, and of its first buffer.
        offset_bytes: of a list offset; 0 where the column is not of lists but of plain integers.
        width: bytes a token.
    """

    node: int
    buffer: int
    offset_bytes: int
    width: int

    @property
    def is_flat(self) -> bool:
        """Whether the column is of plain integers: a record batch is a document then."""
        return self.offset_bytes == 0


@dataclass(frozen=True)
class Footer:
    """What a file's footer says.

    Attributes:
        offsets: [batches] int64, bytes from the file's start to each record batch.
        metadata_bytes: [batches] int64, of each.
        body_bytes: [batches] int64, of each; the body follows the metadata.
        schema: the footer, a FlatBuffer, with zeros in place of the numbers above.
    """

    offsets: np.ndarray
    metadata_bytes: np.ndarray
    body_bytes: np.ndarray
    schema: bytes


def read_footer(path: str, content: np.ndarray) -> Footer:
    """Read the footer of a file.

    Raises:
        DataError: the file does not end as it should, or cannot be read in place.
    """
    tail = content[-10:].tobytes()
    if tail[4:] != MAGIC:
        if content[:4].tobytes() == b"\xff\xff\xff\xff":
            raise DataError(f"{path} is an Arrow stream, which has no table of its rows: write it as an Arrow IPC file")
        raise DataError(f"{path} is truncated or damaged: it does not end as an Arrow file does")
    (length,) = struct.unpack_from("<i", tail)
    if not 0 < length <= len(content) - 10 - len(MAGIC):
        raise DataError(f"{path} is damaged: its footer says that it is {length} bytes long")
    footer = content[-10 - length : -10].tobytes()
    root = _follow(footer, 0)
    schema = _field(footer, root, 1)
    endianness = None if schema is None else _field(footer, _follow(footer, schema), 0)
    if endianness is not None and struct.unpack_from("<h", footer, endianness)[0] != 0:
        raise DataError(f"{path} was written in big-endian order: write it anew on a little-endian machine")
    field = _field(footer, root, 3)
    if field is None:
        nothing = np.zeros(0, dtype=np.int64)
        return Footer(nothing, nothing, nothing, footer)
    vector = _follow(footer, field)
    (count,) = struct.unpack_from("<I", footer, vector)
    begin, end = vector + 4, vector + 4 + count * _BLOCK.itemsize
    if end > len(footer):
        raise IndexError
    blocks = np.frombuffer(footer, dtype=_BLOCK, count=count, offset=begin)
    offsets, body_bytes = blocks["offset"], blocks["body_bytes"]
    metadata_bytes = blocks["metadata_bytes"].astype(np.int64)
    wrong = (offsets < 0) | (metadata_bytes < 8) | (body_bytes < 0) | (body_bytes > len(content))
    if (wrong | (offsets > len(content) - metadata_bytes - body_bytes)).any():
        raise IndexError
    return Footer(offsets, metadata_bytes, body_bytes, footer[:begin] + bytes(end - begin) + footer[end:])


def batch_numbers(path: str, content: np.ndarray, footer: Footer, place: ColumnPlace) -> np.ndarray:
    """Read `LIST_NUMBERS` or `FLAT_NUMBERS` from the metadata of every record batch, [numbers, batches] int64."""
    names = FLAT_NUMBERS if place.is_flat else LIST_NUMBERS
    batches = len(footer.offsets)
    numbers = np.zeros((len(names), batches), dtype=np.int64)
    if batches == 0:
        return numbers
    begins, ends = footer.offsets, footer.offsets + footer.metadata_bytes
    first = content[begins[0] : ends[0]].tobytes()
    positions, free = _positions(path, first, place)
    numbers[:, 0] = _read(first, positions)
    if batches == 1:
        return numbers
    fixed = np.ones(len(first), dtype=bool)
    for begin, end in free:
        fixed[begin:end] = False
    expected = np.frombuffer(first, dtype=np.uint8)[fixed]
    for start in range(1, batches, _BATCHES_AT_ONCE):
        chunk = np.arange(start, min(start + _BATCHES_AT_ONCE, batches))
        alike = chunk[footer.metadata_bytes[chunk] == len(first)]
        # batches L (bytes of metadata)
        metadata = content[begins[alike][:, None] + np.arange(len(first))]
        same = (metadata[:, fixed] == expected).all(axis=1)
        alike, metadata = alike[same], metadata[same]
        for number, at in enumerate(positions):
            numbers[number, alike] = np.ascontiguousarray(metadata[:, at : at + 8]).view("<i8")[:, 0]
        for batch in np.setdiff1d(chunk, alike, assume_unique=True):
            single = content[begins[batch] : ends[batch]].tobytes()
            numbers[:, batch] = _read(single, _positions(path, single, place)[0])
    return numbers


def _read(metadata: bytes, positions: list[int]) -> list[int]:
    return [struct.unpack_from("<q", metadata, at)[0] for at in positions]


def _positions(path: str, metadata: bytes, place: ColumnPlace) -> tuple[list[int], list[tuple[int, int]]]:
    """Parse a record batch's metadata: where the numbers asked for stand, and all ranges of bytes that are numbers."""
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
    own_nodes, own_buffers = (1, 2) if place.is_flat else (2, 4)
    if node_count < place.node + own_nodes or buffer_count < place.buffer + own_buffers:
        raise IndexError
    nodes, buffers = nodes + 4, buffers + 4
    free = [(nodes, nodes + 16 * node_count), (buffers, buffers + 16 * buffer_count)]
    free += [(at, at + 8) for at in (_field(metadata, message, 3), _field(metadata, batch, 0)) if at is not None]
    node, buffer = nodes + 16 * place.node, buffers + 16 * place.buffer
    # A node is (length, nulls), a buffer (offset, length). Integers have one node, and buffers (validity, values).
    if place.is_flat:
        return [node, node + 8, buffer + 16, buffer + 24], free
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
