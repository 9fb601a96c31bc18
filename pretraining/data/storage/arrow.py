"""Arrow IPC files: where each document's tokens lie, as plain byte offsets.

    footer -> record batches -> metadata -> positions of the column's buffers -> list offsets -> bytes of each row

A document is a row, a list of integers. Some tools write a column of plain integers instead: there a record batch is a
document, its rows are the tokens, and its number stands for the row.

pyarrow parses the schema, once for all files that share it. Everything else is read here, as pyarrow does not say where
buffers lie, and takes 22 µs a record batch, which may be a document, to find out. The metadata of all record batches is
read together: the first one is parsed, and every other one that has the same bytes apart from its numbers (checked byte
by byte) has its numbers at the same places. The few that differ are parsed singly.

Formats are those of the Arrow specification, "IPC File Format", and of FlatBuffers' tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import how_to_prepare
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, read_bytes
from pretraining.errors import DataError

MAGIC = b"ARROW1"

TOKEN_TYPES = {pa.uint8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32(), pa.uint64(), pa.int64()}
"""What tokens may be stored as."""

_REMEMBERED_BYTES = 1 << 14
"""A schema is remembered where its footer is not longer; 1024 of them are."""
_BATCHES_AT_ONCE = 4096
_BLOCK = np.dtype([("offset", "<i8"), ("metadata_bytes", "<i4"), ("_", "<i4"), ("body_bytes", "<i8")])


class ArrowFormat:
    """Arrow IPC files with a column of token lists, `col_name`."""

    suffix, title, ending = ".arrow", "an Arrow file", MAGIC
    identity = ""  # indices of Arrow files are older than other formats, and keep their names

    def __init__(self, config: DataConfig) -> None:
        self._column = config.col_name

    def documents(self, path: str) -> DocumentLayout:
        """Finds the documents of a file; see `TokenFormat`."""
        content = read_bytes(path)
        if len(content) < 2 * len(MAGIC) + 6:
            raise DataError(f"damaged: {len(content)} bytes are no Arrow file", path=path)
        try:
            return _ArrowFile(path, self._column, content).documents()
        except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
            raise DataError("damaged: its structure points outside the file", path=path) from error


class _ArrowFile:
    """A file and what its footer says. Whatever points outside the file raises struct.error or IndexError."""

    def __init__(self, path: str, column: str, content: np.ndarray) -> None:
        self.path, self.column, self.content = path, column, content
        self.footer = _read_footer(path, content)
        self.place = _locate_column(path, self.footer.schema, column)
        self.bodies = self.footer.offsets + self.footer.metadata_bytes
        self.numbers = self._batch_numbers()

    def documents(self) -> DocumentLayout:
        """Finds the documents, checked to lie inside their record batches."""
        numbers, width = self.numbers, self.place.width
        tokens = as_tokens(self.content, width, signed=self.place.is_signed)
        if not numbers:  # no record batch
            nothing = np.zeros(0, dtype=np.int64)
            return DocumentLayout(nothing, nothing, width, tokens)
        self._check_inside(numbers["tokens_at"], numbers["tokens_bytes"])
        nulls = np.flatnonzero(numbers["null_tokens"])
        if len(nulls):
            rows_before = numbers["rows"][: nulls[0]].sum()
            where = f"record batch {nulls[0]}" if self.place.is_flat else f"rows from {rows_before} on"
            raise DataError(f"column '{self.column}' has missing tokens (null) in {where}", path=self.path)
        token_starts = self.bodies + numbers["tokens_at"]
        self._check_aligned(token_starts % width)
        if not self.place.is_flat:
            offsets, lengths = self._rows(token_starts)
        else:
            offsets, lengths = token_starts, numbers["rows"]
            self._check_long_enough(numbers["tokens_bytes"], lengths * width, "tokens")
        return DocumentLayout(offsets, lengths, width, tokens)

    def _rows(self, token_starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds offsets and lengths of the rows of a column of lists."""
        place, numbers, rows = self.place, self.numbers, self.numbers["rows"]
        needed = (rows + (rows > 0)) * place.offset_bytes
        self._check_inside(numbers["offsets_at"], needed)
        has_nulls = numbers["null_rows"] > 0
        if has_nulls.any():
            self._check_inside(numbers["validity_at"], np.where(has_nulls, (rows + 7) // 8, 0))
        self._check_long_enough(numbers["offsets_bytes"], needed, "list offsets")
        list_starts = self.bodies + numbers["offsets_at"]
        self._check_aligned(list_starts % place.offset_bytes)

        batch = np.repeat(np.arange(len(rows)), rows)  # of each row
        row_in_batch = np.arange(len(batch)) - (np.cumsum(rows) - rows)[batch]
        at = (list_starts // place.offset_bytes)[batch] + row_in_batch
        list_offsets = as_tokens(self.content, place.offset_bytes, signed=True)
        begins, ends = list_offsets[at].astype(np.int64), list_offsets[at + 1].astype(np.int64)
        wrong = (begins < 0) | (ends < begins) | (ends > (numbers["tokens_bytes"] // place.width)[batch])
        if wrong.any():
            raise DataError(
                "damaged: it lies outside the tokens of its record batch", path=self.path, row=int(wrong.argmax())
            )
        lengths = ends - begins
        if has_nulls.any():
            lengths[self._null_rows(has_nulls, batch, row_in_batch)] = 0
        return token_starts[batch] + begins * place.width, lengths

    def _check_inside(self, starts: np.ndarray, needed: np.ndarray) -> None:
        """Refuses buffers that reach out of the bodies of their record batches, before any of them is looked at."""
        rows, body_bytes = self.numbers["rows"], self.footer.body_bytes
        outside = (rows < 0) | (rows > body_bytes) | (starts < 0) | (needed < 0) | (starts > body_bytes - needed)
        if outside.any():
            raise DataError(f"damaged: record batch {outside.argmax()} reaches beyond its bytes", path=self.path)

    def _check_long_enough(self, sizes: np.ndarray, needed: np.ndarray, what: str) -> None:
        short = sizes < needed
        if short.any():
            raise DataError(f"damaged: record batch {short.argmax()} has fewer {what} than rows", path=self.path)

    def _check_aligned(self, remainders: np.ndarray) -> None:
        if remainders[self.numbers["rows"] > 0].any():
            raise DataError("not aligned as the Arrow format asks: write it anew with an Arrow library", path=self.path)

    def _null_rows(self, has_nulls: np.ndarray, batch: np.ndarray, row_in_batch: np.ndarray) -> np.ndarray:
        """Finds the rows that are null: empty documents, whatever their offsets say. `batch` is that of each row."""
        rows = np.flatnonzero(has_nulls[batch])
        bits = row_in_batch[rows]
        starts = (self.bodies + self.numbers["validity_at"])[batch[rows]]
        valid = self.content[starts + bits // 8] >> (bits % 8).astype(np.uint8) & 1
        null_rows: np.ndarray = rows[valid == 0]
        return null_rows

    def _batch_numbers(self) -> dict[str, np.ndarray]:
        """Reads the numbers of `_positions` from the metadata of every record batch, [batches] int64 each."""
        begins, sizes = self.footer.offsets, self.footer.metadata_bytes
        if not len(begins):
            return {}
        first = self._metadata(0)
        positions, free = self._positions(first)
        numbers = {name: np.zeros(len(begins), dtype=np.int64) for name in positions}
        fixed = np.ones(len(first), dtype=bool)
        for begin, end in free:
            fixed[begin:end] = False
        expected = np.frombuffer(first, dtype=np.uint8)[fixed]
        for start in range(0, len(begins), _BATCHES_AT_ONCE):
            chunk = np.arange(start, min(start + _BATCHES_AT_ONCE, len(begins)))
            alike = chunk[sizes[chunk] == len(first)]
            # batches L (bytes of metadata)
            metadata = self.content[begins[alike][:, None] + np.arange(len(first))]
            same = (metadata[:, fixed] == expected).all(axis=1)
            alike, metadata = alike[same], metadata[same]
            for name, at in positions.items():
                numbers[name][alike] = np.ascontiguousarray(metadata[:, at : at + 8]).view("<i8")[:, 0]
            for batch in np.setdiff1d(chunk, alike, assume_unique=True):
                single = self._metadata(batch)
                for name, at in self._positions(single)[0].items():
                    numbers[name][batch] = struct.unpack_from("<q", single, at)[0]
        return numbers

    def _metadata(self, batch: int) -> bytes:
        begin = self.footer.offsets[batch]
        return self.content[begin : begin + self.footer.metadata_bytes[batch]].tobytes()

    def _positions(self, metadata: bytes) -> tuple[dict[str, int], list[tuple[int, int]]]:
        """Parses a record batch's metadata: places of the wanted numbers, and all ranges of bytes that are numbers.

        The numbers named `_at` count from the start of the batch's body.
        """
        begin = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4  # format V4 has no continuation marker
        message = _follow(metadata, begin)
        header, kind = _field(metadata, message, 2), _field(metadata, message, 1)
        if header is None or kind is None or metadata[kind] != 3:
            raise DataError("damaged: where its footer has a record batch is something else", path=self.path)
        batch = _follow(metadata, header)
        if _field(metadata, batch, 3) is not None:
            raise DataError(
                "compressed, so its documents cannot be read in place: write it without compression", path=self.path
            )
        nodes, node_count = _vector(metadata, batch, 1)
        buffers, buffer_count = _vector(metadata, batch, 2)
        own_nodes, own_buffers = (1, 2) if self.place.is_flat else (2, 4)
        if node_count < self.place.node + own_nodes or buffer_count < self.place.buffer + own_buffers:
            raise IndexError
        free = [(nodes, nodes + 16 * node_count), (buffers, buffers + 16 * buffer_count)]
        free += [(at, at + 8) for at in (_field(metadata, message, 3), _field(metadata, batch, 0)) if at is not None]
        node, buffer = nodes + 16 * self.place.node, buffers + 16 * self.place.buffer
        # A node is (length, nulls), a buffer (offset, length). Integers have one node, and buffers (validity, values).
        if self.place.is_flat:
            return {"rows": node, "null_tokens": node + 8, "tokens_at": buffer + 16, "tokens_bytes": buffer + 24}, free
        # A list has nodes (list, values) and buffers (list's validity, list offsets, values' validity, values).
        return {
            "rows": node,
            "null_rows": node + 8,
            "null_tokens": node + 24,
            "validity_at": buffer,
            "offsets_at": buffer + 16,
            "offsets_bytes": buffer + 24,
            "tokens_at": buffer + 48,
            "tokens_bytes": buffer + 56,
        }, free


@dataclass(frozen=True)
class _Footer:
    """What a file's footer says of its record batches, [batches] int64 each: the body follows the metadata.

    `schema` is the footer, a FlatBuffer, with zeros in place of these numbers: equal for the files of one writer.
    """

    offsets: np.ndarray
    metadata_bytes: np.ndarray
    body_bytes: np.ndarray
    schema: bytes


def _read_footer(path: str, content: np.ndarray) -> _Footer:
    """Reads the footer; a DataError where the file does not end as it should, or cannot be read in place."""
    tail = content[-10:].tobytes()
    if tail[4:] != MAGIC:
        if content[:4].tobytes() == b"\xff\xff\xff\xff":
            raise DataError(
                f"an Arrow stream, which has no table of its rows. {how_to_prepare(Path(path).parent)}", path=path
            )
        raise DataError("truncated or damaged: it does not end as an Arrow file does", path=path)
    (length,) = struct.unpack_from("<i", tail)
    if not 0 < length <= len(content) - 10 - len(MAGIC):
        raise DataError(f"damaged: its footer says that it is {length} bytes long", path=path)
    footer = content[-10 - length : -10].tobytes()
    root = _follow(footer, 0)
    schema = _field(footer, root, 1)
    endianness = None if schema is None else _field(footer, _follow(footer, schema), 0)
    if endianness is not None and struct.unpack_from("<h", footer, endianness)[0] != 0:
        raise DataError("written in big-endian order: write it anew on a little-endian machine", path=path)
    if _field(footer, root, 3) is None:
        nothing = np.zeros(0, dtype=np.int64)
        return _Footer(nothing, nothing, nothing, footer)
    begin, count = _vector(footer, root, 3)
    end = begin + count * _BLOCK.itemsize
    if end > len(footer):
        raise IndexError
    blocks = np.frombuffer(footer, dtype=_BLOCK, count=count, offset=begin)
    offsets, body_bytes = blocks["offset"], blocks["body_bytes"]
    metadata_bytes = blocks["metadata_bytes"].astype(np.int64)
    wrong = (offsets < 0) | (metadata_bytes < 8) | (body_bytes < 0) | (body_bytes > len(content))
    if (wrong | (offsets > len(content) - metadata_bytes - body_bytes)).any():
        raise IndexError
    return _Footer(offsets, metadata_bytes, body_bytes, footer[:begin] + bytes(end - begin) + footer[end:])


def _follow(buffer: bytes, at: int) -> int:
    """Returns the position that a FlatBuffer's reference points to."""
    return at + int(struct.unpack_from("<I", buffer, at)[0])


def _vector(buffer: bytes, table: int, number: int) -> tuple[int, int]:
    """Returns where the elements of a field of a FlatBuffer's table begin, and how many there are."""
    field = _field(buffer, table, number)
    if field is None:
        raise IndexError
    vector = _follow(buffer, field)
    return vector + 4, struct.unpack_from("<I", buffer, vector)[0]


def _field(buffer: bytes, table: int, number: int) -> int | None:
    """Returns the position of a field of a FlatBuffer's table; None where it is left out and so has its default."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    if vtable < 0:
        raise IndexError
    (vtable_bytes,) = struct.unpack_from("<H", buffer, vtable)
    if 4 + 2 * number >= vtable_bytes:
        return None
    (offset,) = struct.unpack_from("<H", buffer, vtable + 4 + 2 * number)
    return table + offset if offset else None


@dataclass(frozen=True)
class _ColumnPlace:
    """Where the column's first field node and first buffer stand in a record batch, and how wide its numbers are.

    `offset_bytes` are those of a list offset, 0 in a column of plain integers; `width` is bytes a token.
    """

    node: int
    buffer: int
    offset_bytes: int
    width: int
    is_signed: bool

    @property
    def is_flat(self) -> bool:
        """Tells whether the column is of plain integers: a record batch is a document then."""
        return self.offset_bytes == 0


def _locate_column(path: str, schema: bytes, column: str) -> _ColumnPlace:
    """Finds the column of the tokens by a file's `_Footer.schema`; a DataError where it cannot be read in place."""
    locate = _locate if len(schema) <= _REMEMBERED_BYTES else _locate.__wrapped__
    try:
        return locate(schema, column)
    except DataError as problem:
        raise DataError(str(problem), path=path) from problem


@lru_cache(maxsize=1024)
def _locate(schema_bytes: bytes, column: str) -> _ColumnPlace:
    schema = _parse(schema_bytes)
    names = schema.names
    if column not in names:
        raise DataError(f"no column '{column}', but {', '.join(names) or 'none at all'}: give --col_name")
    if names.count(column) > 1:
        raise DataError(f"{names.count(column)} columns '{column}', and nothing says which one is meant: keep one")
    kind = schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    token_type = kind.value_type if is_list else kind
    if token_type not in TOKEN_TYPES:
        raise DataError(
            f"column '{column}' is of type {kind}, but documents are lists of integers, such as list<uint16>"
        )
    node = buffer = 0
    for field in schema:
        if field.name == column:
            break
        nodes, buffers = _parts(field.type)
        node, buffer = node + nodes, buffer + buffers
    offset_bytes = (8 if pa.types.is_large_list(kind) else 4) if is_list else 0
    is_signed = pa.types.is_signed_integer(token_type)
    return _ColumnPlace(node, buffer, offset_bytes, token_type.bit_width // 8, is_signed)


def _parse(schema: bytes) -> pa.Schema:
    """Parses the schema with the library, which checks the footer meanwhile, as that of an empty file."""
    file = b"".join((MAGIC, b"\0\0", schema, struct.pack("<i", len(schema)), MAGIC))
    try:
        return pa.ipc.open_file(pa.BufferReader(file)).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"damaged: {error}") from error


_OWN_BUFFERS = (
    (0, (pa.types.is_null,)),
    (2, (pa.types.is_dictionary, pa.types.is_primitive, pa.types.is_decimal, pa.types.is_fixed_size_binary)),
    (3, (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)),
    (1, (pa.types.is_struct, pa.types.is_fixed_size_list)),
    (2, (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)),
)
"""How many buffers a column of a type has, apart from those of its children."""


def _parts(kind: pa.DataType) -> tuple[int, int]:
    """Counts field nodes and buffers of a column of a type, with its children's."""
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(kind.storage_type)
    own = next((buffers for buffers, tests in _OWN_BUFFERS if any(is_of(kind) for is_of in tests)), None)
    if own is None:
        raise DataError(f"a column of type {kind} before the tokens is not supported: write the tokens first")
    children = [_parts(kind.field(number).type) for number in range(kind.num_fields)]
    return 1 + sum(nodes for nodes, _ in children), own + sum(buffers for _, buffers in children)
