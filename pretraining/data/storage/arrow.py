"""The Arrow IPC format: byte offsets of each document's tokens.

    mapped file --pyarrow--> record batches --addresses of the column's buffers--> list offsets --> byte range per row

A document is a row, a list of integers. Some tools write a column of plain integers instead: then a record batch is a
document, and its number stands for the row.

pyarrow checks the structure and copies nothing, in 10 µs per record batch. A buffer outside the mapped file comes from
a compressed file, which is refused. NumPy then checks the contents of all record batches at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import how_to_prepare
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, read_bytes
from pretraining.errors import DataError

MAGIC = b"ARROW1"

TOKEN_TYPES = {pa.uint8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32(), pa.uint64(), pa.int64()}
"""Supported types of tokens."""


class ArrowFormat:
    """Arrow IPC files with a column of token lists, `col_name`."""

    suffix, title, ending = ".arrow", "an Arrow file", MAGIC
    identity = ""  # keeps existing indices valid, which are older than the other formats

    def __init__(self, config: DataConfig) -> None:
        self._column = config.col_name

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        content = read_bytes(path)
        if content[:4].tobytes() == b"\xff\xff\xff\xff":
            raise DataError(
                f"an Arrow stream, but only the Arrow file format works. {how_to_prepare(Path(path).parent)}", path=path
            )
        try:
            return _find_documents(content, self._column)
        except DataError as error:
            raise DataError(str(error), path=path, row=error.row) from error
        except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError, SystemError) as error:
            raise DataError(f"damaged: {error}", path=path) from error


@dataclass(frozen=True)
class _Column:
    """The token column. `offset_bytes` is the width of a list offset, 0 for a column of plain integers."""

    number: int
    tokens: pa.DataType
    offset_bytes: int


def _find_documents(content: np.ndarray, name: str) -> DocumentLayout:
    reader = pa.ipc.open_file(pa.py_buffer(content))
    column = _find_column(reader.schema, name)
    numbers = _read_batches(reader, content, column)
    rows, validity_at, validity_bytes, offsets_at, offsets_bytes, nulls, tokens_at, tokens_bytes = numbers.T
    _check(rows > len(content), "has more rows than bytes")
    _check(np.cumsum(rows) > len(content), "has more rows than bytes")  # a footer may list a batch many times
    for at, size in ((validity_at, validity_bytes), (offsets_at, offsets_bytes), (tokens_at, tokens_bytes)):
        _check((at < 0) | (at > len(content) - size), "is compressed or big-endian: write it plain and little-endian")
    _check(nulls > 0, f"has missing tokens (null) in column '{name}'")
    width = column.tokens.bit_width // 8
    signed = pa.types.is_signed_integer(column.tokens)
    _check((tokens_at % width > 0) & (tokens_bytes > 0), "is not aligned: rewrite it with an Arrow library")
    tokens = as_tokens(content, width, signed=signed)
    if not column.offset_bytes:
        _check(tokens_bytes // width < rows, "has fewer tokens than rows")
        return DocumentLayout(tokens_at, rows, width, tokens)

    size = column.offset_bytes
    _check(offsets_bytes // size < rows + (rows > 0), "has fewer list offsets than rows")
    _check((offsets_at % size > 0) & (rows > 0), "is not aligned: rewrite it with an Arrow library")
    batch = np.repeat(np.arange(len(rows)), rows)  # record batch of each row
    row_in_batch = np.arange(len(batch)) - (np.cumsum(rows) - rows)[batch]
    list_offsets = as_tokens(content, size, signed=True)
    at = (offsets_at // size)[batch] + row_in_batch
    begins, ends = list_offsets[at].astype(np.int64), list_offsets[at + 1].astype(np.int64)
    wrong = (begins < 0) | (ends < begins) | (ends > (tokens_bytes // width)[batch])
    if wrong.any():
        raise DataError("damaged: the row is outside the tokens of its record batch", row=int(wrong.argmax()))
    _check((validity_bytes > 0) & (validity_bytes < (rows + 7) // 8), "has a validity bitmap that is too short")
    # A null row is an empty document, whatever its offsets are.
    nullable = np.flatnonzero(validity_bytes[batch])
    bits = row_in_batch[nullable]
    is_valid = content[validity_at[batch[nullable]] + bits // 8] >> (bits % 8).astype(np.uint8) & 1
    lengths = ends - begins
    lengths[nullable[is_valid == 0]] = 0
    return DocumentLayout(tokens_at[batch] + begins * width, lengths, width, tokens)


def _check(is_wrong: np.ndarray, problem: str) -> None:
    if is_wrong.any():
        raise DataError(f"damaged or unsupported: record batch {is_wrong.argmax()} {problem}")


def _find_column(schema: pa.Schema, name: str) -> _Column:
    """Find the token column; raise a DataError if it is missing or has another type."""
    if schema.names.count(name) != 1:
        raise DataError(f"no single column '{name}' among {', '.join(schema.names) or 'none'}: give --col_name")
    kind = schema.field(name).type
    is_list, is_large_list = pa.types.is_list(kind), pa.types.is_large_list(kind)
    tokens = kind.value_type if is_list or is_large_list else kind
    if tokens not in TOKEN_TYPES:
        raise DataError(f"column '{name}' is of type {kind}, but documents are lists of integers, such as list<uint16>")
    return _Column(schema.get_field_index(name), tokens, 8 if is_large_list else 4 if is_list else 0)


def _read_batches(reader: pa.ipc.RecordBatchFileReader, content: np.ndarray, column: _Column) -> np.ndarray:
    """Return rows, offsets and sizes of buffers per record batch, [batches, 8].

    Lists have the buffers validity, list offsets, validity of tokens (only its size is returned) and tokens; integers
    have validity and tokens. pyarrow omits a validity without nulls.
    """
    start = pa.py_buffer(content).address
    numbers = np.zeros((reader.num_record_batches, 8), dtype=np.int64)
    for number, target in enumerate(numbers):
        array = reader.get_batch(number).column(column.number)
        places = [
            (buffer.address - start, buffer.size) if buffer is not None and buffer.size else (0, 0)
            for buffer in array.buffers()
        ]
        if not column.offset_bytes:
            places = [(0, 0), (0, 0), *places]
        validity, offsets, nulls, tokens = places
        target[:] = (len(array), *validity, *offsets, nulls[1], *tokens)
    return numbers
