"""Where each document's tokens lie in an Arrow IPC file, as plain byte offsets.

Training never decodes Arrow: it reads so many tokens at a byte offset. This module finds the offsets once, for the
index:

    footer -> record batches -> metadata -> positions of the column's buffers -> list offsets -> bytes of each row

A document is a row, a list of integers. Some tools write a column of plain integers instead: there a record batch is a
document, its rows are the tokens, and its number stands for the row.

Files of one document a record batch have as many metadata blocks as documents, so these are read together: the first
one is parsed, and every other one that has the same bytes apart from its numbers (checked byte by byte) has its numbers
at the same places. The few that differ are parsed singly.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np

from pretraining.data.arrow_metadata import (
    FLAT_NUMBERS,
    LIST_NUMBERS,
    MAGIC,
    ColumnPlace,
    Footer,
    batch_numbers,
    read_footer,
)
from pretraining.data.arrow_schema import locate_column
from pretraining.errors import DataError

_SMALL_FILE_BYTES = 1 << 16
"""Files up to this size are read as a whole, which is faster than to map them."""


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a file, in row order.

    Attributes:
        offsets: [n] int64, bytes from the start of the file to a document's first token.
        lengths: [n] int64, in tokens.
        width: bytes a token.
        tokens: the file as unsigned integers of this width, a multiple of which is the offset of every document that is
            not empty.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    width: int
    tokens: np.ndarray


def read_document_layout(path: str, column: str) -> DocumentLayout:
    """Find the documents of an Arrow IPC file.

    Args:
        path: of the file.
        column: name of the column of token lists.

    Raises:
        DataError: the file is truncated or damaged, has no such column, or the column cannot be read in place.
    """
    try:
        content = _content(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if len(content) < 2 * len(MAGIC) + 6:
        raise DataError(f"{path} is damaged: {len(content)} bytes are no Arrow file")
    try:
        footer = read_footer(path, content)
        place = locate_column(path, footer.schema, column)
        numbers = batch_numbers(path, content, footer, place)
        if place.is_flat:
            offsets, lengths = _batches(path, footer, dict(zip(FLAT_NUMBERS, numbers, strict=True)), place, column)
        else:
            numbered = dict(zip(LIST_NUMBERS, numbers, strict=True))
            offsets, lengths = _rows(path, content, footer, numbered, place, column)
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: its structure points outside the file") from error
    return DocumentLayout(offsets, lengths, place.width, _as_integers(content, f"<u{place.width}"))


def _content(path: str) -> np.ndarray:
    """The bytes of a file, read or mapped."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        size = os.fstat(descriptor).st_size
        if size <= _SMALL_FILE_BYTES:
            return np.frombuffer(os.read(descriptor, size), dtype=np.uint8)
        return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)


def _as_integers(content: np.ndarray, dtype: str) -> np.ndarray:
    """A file as integers, without the bytes that are left over at its end."""
    width = np.dtype(dtype).itemsize
    return content[: len(content) // width * width].view(dtype)


def _rows(
    path: str,
    content: np.ndarray,
    footer: Footer,
    numbers: dict[str, np.ndarray],
    place: ColumnPlace,
    column: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of the rows of a column of lists."""
    bodies = footer.offsets + footer.metadata_bytes
    rows = numbers["rows"]
    needed = (rows + (rows > 0)) * place.offset_bytes
    _check_inside(path, footer, rows, numbers["offsets_at"], needed)
    _check_inside(path, footer, rows, numbers["tokens_at"], numbers["tokens_bytes"])
    has_nulls = numbers["null_rows"] > 0
    if has_nulls.any():
        _check_inside(path, footer, rows, numbers["validity_at"], np.where(has_nulls, (rows + 7) // 8, 0))
    short = numbers["offsets_bytes"] < needed
    if short.any():
        raise DataError(f"{path} is damaged: record batch {np.flatnonzero(short)[0]} has fewer list offsets than rows")
    nulls = np.flatnonzero(numbers["null_tokens"])
    if len(nulls):
        raise DataError(
            f"column '{column}' of {path} has missing tokens (null) in rows from {rows[: nulls[0]].sum()} on"
        )
    list_starts, token_starts = bodies + numbers["offsets_at"], bodies + numbers["tokens_at"]
    _check_aligned(path, rows, list_starts % place.offset_bytes + token_starts % place.width)

    batch = np.repeat(np.arange(len(rows)), rows)  # of each row
    row_in_batch = np.arange(len(batch)) - (np.cumsum(rows) - rows)[batch]
    at = (list_starts // place.offset_bytes)[batch] + row_in_batch
    list_offsets = _as_integers(content, f"<i{place.offset_bytes}")
    begins, ends = list_offsets[at].astype(np.int64), list_offsets[at + 1].astype(np.int64)
    wrong = (begins < 0) | (ends < begins) | (ends > (numbers["tokens_bytes"] // place.width)[batch])
    if wrong.any():
        row = np.flatnonzero(wrong)[0]
        raise DataError(f"{path} is damaged: row {row} lies outside the tokens of its record batch")
    lengths = ends - begins
    if has_nulls.any():
        lengths[_null_rows(content, bodies + numbers["validity_at"], has_nulls, batch, row_in_batch)] = 0
    return token_starts[batch] + begins * place.width, lengths


def _batches(
    path: str, footer: Footer, numbers: dict[str, np.ndarray], place: ColumnPlace, column: str
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of the record batches of a column of plain integers."""
    tokens = numbers["tokens"]
    _check_inside(path, footer, tokens, numbers["tokens_at"], numbers["tokens_bytes"])
    short = numbers["tokens_bytes"] < tokens * place.width
    if short.any():
        raise DataError(f"{path} is damaged: record batch {np.flatnonzero(short)[0]} has fewer tokens than rows")
    nulls = np.flatnonzero(numbers["null_tokens"])
    if len(nulls):
        raise DataError(f"column '{column}' of {path} has missing tokens (null) in record batch {nulls[0]}")
    starts = footer.offsets + footer.metadata_bytes + numbers["tokens_at"]
    _check_aligned(path, tokens, starts % place.width)
    return starts, tokens


def _check_inside(path: str, footer: Footer, rows: np.ndarray, starts: np.ndarray, needed: np.ndarray) -> None:
    """Refuse buffers that reach out of the bodies of their record batches, before any of them is looked at."""
    bodies = footer.body_bytes
    outside = (rows < 0) | (rows > bodies) | (starts < 0) | (needed < 0) | (starts > bodies - needed)
    if outside.any():
        raise DataError(f"{path} is damaged: record batch {np.flatnonzero(outside)[0]} reaches beyond its bytes")


def _check_aligned(path: str, rows: np.ndarray, remainders: np.ndarray) -> None:
    if remainders[rows > 0].any():
        raise DataError(f"{path} is not aligned as the Arrow format asks: write it anew with an Arrow library")


def _null_rows(
    content: np.ndarray, starts: np.ndarray, has_nulls: np.ndarray, batch: np.ndarray, row_in_batch: np.ndarray
) -> np.ndarray:
    """Numbers of the rows that are null; they are empty documents, whatever their offsets say.

    Args:
        content: the file.
        starts: [batches], where the bits of each record batch's rows are.
        has_nulls: [batches], whether these bits are there.
        batch: of each row.
        row_in_batch: of each row.
    """
    rows = np.flatnonzero(has_nulls[batch])
    bits = row_in_batch[rows]
    valid = content[starts[batch[rows]] + bits // 8] >> (bits % 8).astype(np.uint8) & 1
    return rows[valid == 0]
