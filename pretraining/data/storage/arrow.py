"""The Arrow IPC formats, files and streams: byte offsets of each document's tokens.

    mapped file --pyarrow--> record batches --addresses of the column's buffers--> offsets, lengths --> bytes per row

A document is a row, a list of integers. Some tools write a column of plain integers instead: then a record batch is a
document, and its number stands for the row. The `datasets` library writes streams.

pyarrow checks the structure and copies nothing, in 10 µs per record batch. A buffer outside the mapped file comes from
a compressed file, which is refused. NumPy then checks the contents of all record batches at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, beginning_of, read_bytes
from pretraining.errors import DataError
from pretraining.files import Location

MAGIC = b"ARROW1"
STREAM_MAGIC = b"\xff\xff\xff\xff"
STREAM_END = STREAM_MAGIC + bytes(4)

_LISTS = (
    (pa.types.is_list, "list", 4),
    (pa.types.is_large_list, "list", 8),
    (pa.types.is_list_view, "view", 4),
    (pa.types.is_large_list_view, "view", 8),
    (pa.types.is_fixed_size_list, "fixed", 0),
)
"""Supported types of documents: test, layout of the buffers, bytes of a list offset."""


class ArrowFormat:
    """Arrow IPC files with a column of token lists, `col_name`."""

    suffix, ending = ".arrow", MAGIC
    identity = "arrow"
    _messages_at = 8
    """First byte of the stream of messages that every file holds."""

    def __init__(self, config: DataConfig) -> None:
        self._column = config.col_name

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        content = read_bytes(path)
        try:
            schema, batches = self._open(content)
            column = _find_column(schema, self._column)
            if column.layout == "fixed":
                batches = _batches_of_structs(content[self._messages_at :], schema)
            return _find_documents(batches, content, column)
        except DataError as error:
            raise DataError(str(error), path=path, row=error.row) from error
        except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError, SystemError) as error:
            raise DataError(f"damaged: {error}", path=path) from error

    def _open(self, content: np.ndarray) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if content[: len(STREAM_MAGIC)].tobytes() == STREAM_MAGIC:
            raise DataError(
                "an Arrow stream, not an Arrow file: leave out --file_type, or give --file_type=arrow_stream. A "
                "dataset has files of one kind"
            )
        reader = pa.ipc.open_file(pa.py_buffer(content))
        return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))


class ArrowStreamFormat(ArrowFormat):
    """Arrow IPC streams, as `save_to_disk` of the `datasets` library writes them."""

    ending, identity = STREAM_END, "arrow_stream"
    _messages_at = 0

    @staticmethod
    def accepts(path: Location, config: DataConfig) -> bool:
        """Return whether a file is a stream."""
        return beginning_of(path, len(STREAM_MAGIC)) == STREAM_MAGIC

    def _open(self, content: np.ndarray) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if content[: len(STREAM_MAGIC)].tobytes() != STREAM_MAGIC:
            raise DataError("no Arrow stream, unlike other files of its dataset: a dataset has files of one kind")
        if content[-len(STREAM_END) :].tobytes() != STREAM_END:
            raise DataError("truncated or damaged: it lacks the ending of an Arrow stream")
        reader = pa.ipc.open_stream(pa.py_buffer(content))
        return reader.schema, iter(reader)


@dataclass(frozen=True)
class _Column:
    """The token column.

    Attributes:
        layout: buffers of its type: "list", "view", "fixed", or "flat" for a column of plain integers.
        offset_bytes: width of a list offset; 0 without offsets.
        list_size: tokens per document of a fixed-size list.
    """

    name: str
    number: int
    tokens: pa.DataType
    layout: str = "flat"
    offset_bytes: int = 0
    list_size: int = 0


def _find_documents(batches: Iterator[pa.RecordBatch], content: np.ndarray, column: _Column) -> DocumentLayout:
    numbers = _read_batches(batches, content, column)
    rows, nulls, *places = numbers.T
    validity_at, validity_bytes, offsets_at, offsets_bytes, sizes_at, sizes_bytes, tokens_at, tokens_bytes = places
    # A footer may list a batch many times, and absurd numbers of rows: their sum overflows integers.
    _check(np.cumsum(rows, dtype=np.float64) > len(content), "has more rows than bytes")
    flags = f"with this folder as --input_path and --text_field={column.name}"
    for at, size in zip(places[::2], places[1::2], strict=True):
        is_elsewhere = (at < 0) | (at > len(content) - size)
        _check(is_elsewhere, f"is compressed or big-endian: `pretrain prepare` writes it plain, {flags}")
    _check(nulls > 0, f"has missing tokens (null) in column '{column.name}'")
    width = column.tokens.bit_width // 8
    signed = pa.types.is_signed_integer(column.tokens)
    _check((tokens_at % width > 0) & (tokens_bytes > 0), "is not aligned: rewrite it with an Arrow library")
    tokens = as_tokens(content, width, signed=signed)
    if column.layout == "flat":
        _check(tokens_bytes // width < rows, "has fewer tokens than rows")
        return DocumentLayout(tokens_at, rows, width, tokens)

    batch = np.repeat(np.arange(len(rows)), rows)  # record batch of each row
    row_in_batch = np.arange(len(batch)) - (np.cumsum(rows) - rows)[batch]
    if column.layout == "fixed":
        begins = row_in_batch * column.list_size
        ends = begins + column.list_size
    else:
        list_numbers = as_tokens(content, column.offset_bytes, signed=True)

        def numbers_of(at: np.ndarray, size: np.ndarray, surplus: int = 0, shift: int = 0) -> np.ndarray:
            """Return a number per row from a buffer of each record batch, which has `surplus` more; skip `shift`."""
            places, capacity = at // column.offset_bytes, size // column.offset_bytes
            _check(capacity < rows + surplus * (rows > 0), "has fewer list offsets than rows")
            _check((at % column.offset_bytes > 0) & (rows > 0), "is not aligned: rewrite it with an Arrow library")
            per_row: np.ndarray = list_numbers[places[batch] + row_in_batch + shift].astype(np.int64)
            return per_row

        if column.layout == "list":
            begins, ends = numbers_of(offsets_at, offsets_bytes, 1), numbers_of(offsets_at, offsets_bytes, 1, 1)
        else:
            begins = numbers_of(offsets_at, offsets_bytes)
            ends = begins + numbers_of(sizes_at, sizes_bytes)
    _check((validity_bytes > 0) & (validity_bytes < (rows + 7) // 8), "has a validity bitmap that is too short")
    # A null row is an empty document, whatever its offsets are.
    nullable = np.flatnonzero(validity_bytes[batch])
    bits = row_in_batch[nullable]
    is_valid = content[validity_at[batch[nullable]] + bits // 8] >> (bits % 8).astype(np.uint8) & 1
    lengths = ends - begins
    wrong = (begins < 0) | (lengths < 0) | (ends > (tokens_bytes // width)[batch])
    if column.layout == "view":  # the place of an empty list is free
        wrong[lengths == 0] = False
        wrong[nullable[is_valid == 0]] = False
    if wrong.any():
        raise DataError("damaged: the row is outside the tokens of its record batch", row=int(wrong.argmax()))
    lengths[nullable[is_valid == 0]] = 0
    return DocumentLayout(tokens_at[batch] + begins * width, lengths, width, tokens)


def _check(is_wrong: np.ndarray, problem: str) -> None:
    if is_wrong.any():
        raise DataError(f"damaged or unsupported: record batch {is_wrong.argmax()} {problem}")


def _find_column(schema: pa.Schema, name: str) -> _Column:
    """Find the token column; raise a DataError if it is missing or has another type."""
    if schema.names.count(name) != 1:
        raise DataError(f"no single column '{name}' among {', '.join(schema.names) or 'none'}: give --col_name")
    kind, number = schema.field(name).type, schema.get_field_index(name)
    layout, offset_bytes = next(((layout, size) for test, layout, size in _LISTS if test(kind)), ("flat", 0))
    tokens = kind if layout == "flat" else kind.value_type
    if not pa.types.is_integer(tokens):
        raise DataError(
            f"column '{name}' is of type {kind}, but documents are plain lists of integers, such as list<uint16>"
        )
    return _Column(name, number, tokens, layout, offset_bytes, kind.list_size if layout == "fixed" else 0)


def _read_batches(batches: Iterator[pa.RecordBatch], content: np.ndarray, column: _Column) -> np.ndarray:
    """Return rows, missing tokens, and offsets and sizes of four buffers per record batch, [batches, 10].

    The buffers are validity, list offsets, list sizes and tokens. pyarrow omits a validity without nulls.
    """
    start = pa.py_buffer(content).address
    numbers = []
    for record_batch in batches:
        array = record_batch.column(column.number)
        places = [
            (buffer.address - start, buffer.size) if buffer is not None and buffer.size else (0, 0)
            for buffer in array.buffers()
        ]
        *lists, validity_of_tokens, tokens = places
        lists += [(0, 0)] * (3 - len(lists))
        numbers.append((len(array), validity_of_tokens[1], *(number for place in (*lists, tokens) for number in place)))
    return np.array(numbers, dtype=np.int64).reshape(-1, 10)


def _batches_of_structs(content: np.ndarray, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream with fixed-size lists as structs of one field, which have the same buffers.

    pyarrow ends the process if a damaged list has fewer values than its size says. Columns from a dictionary are read
    as their numbers.
    """
    kinds = [
        pa.struct([("item", kind.value_type)])
        if pa.types.is_fixed_size_list(kind)
        else (kind.index_type if pa.types.is_dictionary(kind) else kind)
        for kind in schema.types
    ]
    flat = pa.schema(list(zip(schema.names, kinds, strict=True)))
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(content)):
        if message.type == "record batch":
            yield pa.ipc.read_record_batch(message, flat)
