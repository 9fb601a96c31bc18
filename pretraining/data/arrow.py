"""Where each document's tokens lie in an Arrow IPC file, as plain byte offsets.

Training never decodes Arrow: it reads so many tokens at a byte offset. This module finds the offsets once, for the
index:

    footer -> record batches -> metadata -> positions of the column's buffers -> list offsets -> bytes of each row

Files of one document a record batch have as many metadata blocks as documents, so these are read together: the first
one is parsed, and every other one that has the same bytes apart from its numbers (checked byte by byte) has its numbers
at the same places. The few that differ are parsed singly.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.data.arrow_metadata import MAGIC, NUMBERS, ColumnPlace, batch_numbers, read_footer, record_batches
from pretraining.errors import DataError

TOKEN_WIDTHS = {
    pa.uint8(): 1,
    pa.uint16(): 2,
    pa.int16(): 2,
    pa.uint32(): 4,
    pa.int32(): 4,
    pa.uint64(): 8,
    pa.int64(): 8,
}
"""Bytes a token. Negative numbers read as very large ones, and so as beyond any vocabulary."""


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a file, in row order.

    Attributes:
        offsets: [n] int64, bytes from the start of the file to a document's first token.
        lengths: [n] int64, in tokens.
        ends_with_sep: [n] bool, whether the last token is the separator; all False where none was asked for.
        width: bytes a token.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    ends_with_sep: np.ndarray
    width: int


def read_document_layout(path: str, column: str, sep_token: int | None = None) -> DocumentLayout:
    """Find the documents of an Arrow IPC file.

    Args:
        path: of the file.
        column: name of the column of token lists.
        sep_token: token to look for at the documents' ends.

    Raises:
        DataError: the file is truncated or damaged, has no such column, or the column cannot be read in place.
    """
    try:
        size = Path(path).stat().st_size
        if size < 2 * len(MAGIC) + 6:
            raise DataError(f"{path} is damaged: {size} bytes are no Arrow file")
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return _layout(path, content, column, sep_token)
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: its structure points outside the file") from error


def _layout(path: str, content: np.ndarray, column: str, sep_token: int | None) -> DocumentLayout:
    footer = read_footer(path, content)
    schema = _schema(path)
    place = _locate_column(path, schema, column)
    blocks = record_batches(path, content, footer)
    numbers = dict(zip(NUMBERS, batch_numbers(path, content, blocks, place).T, strict=True))
    _check_batches(path, content, blocks, numbers, place, column)
    body = blocks["offset"] + blocks["metadata_bytes"]

    rows = numbers["rows"]
    batch = np.repeat(np.arange(len(rows)), rows)  # of each row
    row_in_batch = np.arange(len(batch)) - np.repeat(np.cumsum(rows) - rows, rows)
    list_offsets = content[: len(content) // place.offset_bytes * place.offset_bytes].view(f"<i{place.offset_bytes}")
    at = ((body + numbers["offsets_at"]) // place.offset_bytes)[batch] + row_in_batch
    begins = list_offsets[at].astype(np.int64)
    ends = list_offsets[at + 1].astype(np.int64)

    wrong = np.flatnonzero((begins < 0) | (ends < begins) | (ends > (numbers["tokens_bytes"] // place.width)[batch]))
    if len(wrong):
        raise DataError(f"{path} is damaged: row {wrong[0]} lies outside the tokens of its record batch")
    lengths = ends - begins
    lengths[_null_rows(content, body, numbers, batch, row_in_batch)] = 0
    offsets = (body + numbers["tokens_at"])[batch] + begins * place.width

    ends_with_sep = np.zeros(len(lengths), dtype=bool)
    if sep_token is not None and sep_token < 1 << 8 * place.width:
        tokens = content[: len(content) // place.width * place.width].view(f"<u{place.width}")
        filled = np.flatnonzero(lengths)
        ends_with_sep[filled] = tokens[offsets[filled] // place.width + lengths[filled] - 1] == sep_token
    return DocumentLayout(offsets, lengths, ends_with_sep, place.width)


def _schema(path: str) -> pa.Schema:
    """The file's schema; the library checks the footer while it reads it."""
    try:
        with pa.memory_map(path) as source:
            return pa.ipc.open_file(source).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _locate_column(path: str, schema: pa.Schema, column: str) -> ColumnPlace:
    names = schema.names
    if column not in names:
        raise DataError(f"{path} has no column '{column}', but {', '.join(names) or 'none at all'}: give --col_name")
    kind = schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or kind.value_type not in TOKEN_WIDTHS:
        raise DataError(
            f"column '{column}' of {path} holds {kind}, but documents are lists of integers, such as list<uint16>"
        )
    node = buffer = 0
    for field in schema:
        if field.name == column:
            break
        nodes, buffers = _parts(path, field.type)
        node, buffer = node + nodes, buffer + buffers
    return ColumnPlace(node, buffer, 8 if pa.types.is_large_list(kind) else 4, TOKEN_WIDTHS[kind.value_type])


def _parts(path: str, kind: pa.DataType) -> tuple[int, int]:
    """How many field nodes and buffers a column of a type has, with its children's."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(path, kind.storage_type)
    if types.is_null(kind):
        return 1, 0
    if (
        types.is_dictionary(kind)
        or types.is_primitive(kind)
        or types.is_decimal(kind)
        or types.is_fixed_size_binary(kind)
    ):
        return 1, 2
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        return 1, 3
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        own, children = (1, 1), [kind.field(number).type for number in range(kind.num_fields)]
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        own, children = (1, 2), [kind.field(number).type for number in range(kind.num_fields)]
    else:
        raise DataError(
            f"{path} has a column of type {kind} before the tokens, which is not supported: write the tokens first"
        )
    parts = [own, *(_parts(path, child) for child in children)]
    return sum(nodes for nodes, _ in parts), sum(buffers for _, buffers in parts)


def _check_batches(
    path: str, content: np.ndarray, blocks: np.ndarray, numbers: dict[str, np.ndarray], place: ColumnPlace, column: str
) -> None:
    """Refuse what cannot be read in place, before any of it is looked at."""
    rows, body = numbers["rows"], blocks["offset"] + blocks["metadata_bytes"]
    for start, bytes_needed in (
        ("offsets_at", np.where(rows > 0, (rows + 1) * place.offset_bytes, 0)),
        ("tokens_at", numbers["tokens_bytes"]),
        ("validity_at", np.where(numbers["null_rows"] > 0, (rows + 7) // 8, 0)),
    ):
        outside = (rows < 0) | (rows > blocks["body_bytes"]) | (numbers[start] < 0) | (bytes_needed < 0)
        outside |= numbers[start] > blocks["body_bytes"] - bytes_needed
        if outside.any():
            raise DataError(f"{path} is damaged: record batch {np.flatnonzero(outside)[0]} reaches beyond its bytes")
    short = np.flatnonzero((rows > 0) & (numbers["offsets_bytes"] < (rows + 1) * place.offset_bytes))
    if len(short):
        raise DataError(f"{path} is damaged: record batch {short[0]} has fewer list offsets than rows")
    nulls = np.flatnonzero(numbers["null_tokens"])
    if len(nulls):
        raise DataError(
            f"column '{column}' of {path} has missing tokens (null) in rows from {rows[: nulls[0]].sum()} on"
        )
    crooked = (body + numbers["offsets_at"]) % place.offset_bytes + (body + numbers["tokens_at"]) % place.width
    if crooked[rows > 0].any():
        raise DataError(f"{path} is not aligned as the Arrow format asks: write it anew with an Arrow library")


def _null_rows(
    content: np.ndarray, body: np.ndarray, numbers: dict[str, np.ndarray], batch: np.ndarray, row_in_batch: np.ndarray
) -> np.ndarray:
    """Numbers of the rows that are null; they are empty documents, whatever their offsets say."""
    rows = np.flatnonzero(numbers["null_rows"][batch] > 0)
    bits = row_in_batch[rows]
    valid = content[(body + numbers["validity_at"])[batch[rows]] + bits // 8] >> (bits % 8).astype(np.uint8) & 1
    return rows[valid == 0]
