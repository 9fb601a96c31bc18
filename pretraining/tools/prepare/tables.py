"""Parquet and Arrow files as pieces: a document a row, in one column.

A column of strings is text; a column of lists of integers is token ids, which are taken as they are. Rows without a
value (null) are empty documents. Files are read a few rows at a time, and only that column of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import InputFile
from pretraining.tools.prepare.text import Piece, cut_text

ROWS_AT_ONCE = 128
"""Small enough that rows of megabytes fit into memory, large enough that rows of tokens cost little."""
_READ_BYTES = 1 << 20
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


def read_table(file: InputFile, column: str, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
    """Reads the documents of a table, or of its row groups (Parquet) or record batches (Arrow) from begin to end.

    Raises:
        DataError: the file cannot be read, has no such column, or the column holds something else.
    """
    rows = _parquet_rows if file.kind == "parquet" else _arrow_rows
    with _damage_named(file):
        yield from rows(file, column, begin, end)


def column_type(file: InputFile, column: str) -> pa.DataType:
    """The type of a table's column.

    Raises:
        DataError: the file cannot be read, or has no such column.
    """
    with _damage_named(file):
        if file.kind == "parquet":
            schema = pq.read_schema(file.path)
        else:
            with _open_arrow(file) as reader:
                schema = reader.schema
    return field_type(schema, column, str(file.path))


def ranges_of_table(file: InputFile, wanted_bytes: int) -> list[tuple[int, int | None, int]]:
    """Cuts a table into (begin, end, bytes), each of about the wanted bytes on disk; one range where it cannot be cut.

    Raises:
        DataError: the file cannot be read.
    """
    with _damage_named(file):
        if file.kind == "parquet":
            metadata = pq.read_metadata(file.path)
            weights = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        else:
            with _open_arrow(file) as reader:
                is_file = isinstance(reader, pa.RecordBatchFileReader)  # a stream does not know its record batches
                weights = [1] * (reader.num_record_batches if is_file else 0)
    pieces = min(len(weights), -(-file.size // wanted_bytes))
    if pieces < 2:
        return [(0, None, file.size)]
    ends = np.cumsum(weights)
    total = max(int(ends[-1]), 1)
    # After the last group that ends within the first i-th of the rows; wide groups may leave ranges empty.
    cuts = sorted({0, len(weights), *(int(np.searchsorted(ends, total * i // pieces, "right")) for i in range(pieces))})
    bytes_before = [0, *(int(end) * file.size // total for end in ends)]
    return [(begin, end, bytes_before[end] - bytes_before[begin]) for begin, end in pairwise(cuts)]


def field_type(schema: pa.Schema, column: str, place: str) -> pa.DataType:
    """The type of a column; a DataError where none or several have that name."""
    if schema.names.count(column) != 1:
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in schema) or "none"
        count = "several columns" if column in schema.names else "no column"
        raise DataError(
            f"{place}: {count} {column!r}. The columns are: {columns}; name the one with the text, or with lists of "
            "token ids, by --text_field"
        )
    return schema.field(column).type


def token_type(kind: pa.DataType, column: str, place: str) -> pa.DataType | None:
    """The type of the token ids in a column; None where it holds text; a DataError where it holds neither."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if any(is_text(value) for is_text in _TEXT_TYPES) or pa.types.is_null(kind):
        return None
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and pa.types.is_integer(kind.value_type):
        return kind.value_type
    raise DataError(
        f"{place}: column {column!r} holds {kind}, but text (string) or token ids (a list of integers a row) are "
        "expected. Name another one by --text_field"
    )


def pieces_of_rows(rows: pa.Array, column: str, place: str, first_row: int, bytes_read: int) -> Iterator[Piece]:
    """Some rows of a column as pieces.

    Args:
        place: what the rows are of, for messages.
        first_row: its number there.
        bytes_read: size of the rows on disk.

    Raises:
        DataError: a row is no text, or has missing tokens.
    """
    if token_type(rows.type, column, place) is None:
        documents: Iterator[tuple[str | np.ndarray, bool, int]] = _texts(rows, column, place, first_row)
    else:
        documents = _token_lists(rows, column, place, first_row)
    for content, ends, row in documents:
        yield Piece(content, ends, bytes_read, f"{place}, row {row:,}")
        bytes_read = 0


def _texts(rows: pa.Array, column: str, place: str, first_row: int) -> Iterator[tuple[str, bool, int]]:
    for row, scalar in enumerate(rows, start=first_row):
        try:
            text = scalar.as_py()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place}, row {row:,}: column {column!r} is not UTF-8 at byte {error.start:,} of the text "
                f"(0x{error.object[error.start]:02x}). Write the file again with valid text"
            ) from error
        for part, ends in cut_text(text or ""):
            yield part, ends, row


def _token_lists(rows: pa.Array, column: str, place: str, first_row: int) -> Iterator[tuple[np.ndarray, bool, int]]:
    lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False)
    values = rows.flatten()  # without what lies under null rows
    ends = np.cumsum(lengths)
    if values.null_count:
        missing = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = int(np.searchsorted(ends, missing, side="right"))
        raise DataError(
            f"{place}, row {first_row + row:,}: column {column!r} has a missing token (null) at position "
            f"{missing - int(ends[row] - lengths[row]):,}. Write the file again without it"
        )
    tokens = values.to_numpy(zero_copy_only=False)
    for row, (begin, end) in enumerate(zip(ends - lengths, ends, strict=True), start=first_row):
        yield tokens[begin:end], True, row


def _parquet_rows(file: InputFile, column: str, begin: int, end: int | None) -> Iterator[Piece]:
    # Without pre_buffer and with a buffer, a column is read page by page and not a row group at once.
    with pq.ParquetFile(file.path, buffer_size=_READ_BYTES, pre_buffer=False) as table:
        field_type(table.schema_arrow, column, str(file.path))
        metadata = table.metadata
        groups = range(begin, metadata.num_row_groups if end is None else end)
        row = sum(metadata.row_group(number).num_rows for number in range(begin))
        row_bytes = file.size / max(metadata.num_rows, 1)
        batches = table.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[column], use_threads=False)
        for batch in batches if groups else ():
            yield from pieces_of_rows(batch.column(0), column, str(file.path), row, int(row_bytes * len(batch)))
            row += len(batch)


def _arrow_rows(file: InputFile, column: str, begin: int, end: int | None) -> Iterator[Piece]:
    with _open_arrow(file) as reader:
        schema = reader.schema
    field_type(schema, column, str(file.path))
    # Other columns may be compressed: they are not even unpacked.
    with _open_arrow(file, included_fields=[schema.get_field_index(column)]) as reader:
        if isinstance(reader, pa.RecordBatchFileReader):
            count = reader.num_record_batches
            numbers = range(begin, count if end is None else end)
            batches: Iterator[tuple[int, pa.RecordBatch]] = ((number, reader.get_batch(number)) for number in numbers)
            batch_bytes = file.size // max(count, 1)
        else:
            batches, batch_bytes = enumerate(reader), 0
        for number, batch in batches:
            rows = batch.column(0)
            for at in range(0, len(rows), ROWS_AT_ONCE):
                some = rows.slice(at, ROWS_AT_ONCE)
                read = batch_bytes * len(some) // len(rows)
                yield from pieces_of_rows(some, column, f"{file.path}, record batch {number:,}", at, read)


@contextmanager
def _open_arrow(
    file: InputFile, included_fields: list[int] | None = None
) -> Iterator[pa.RecordBatchFileReader | pa.RecordBatchStreamReader]:
    """An Arrow file in either of its two formats, of which only one knows where its record batches are."""
    with file.path.open("rb") as opened:
        is_stream = opened.read(6) != b"ARROW1"
    options = pa.ipc.IpcReadOptions(included_fields=included_fields)
    with pa.memory_map(str(file.path)) as source:
        yield (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(source, options=options)


@contextmanager
def _damage_named(file: InputFile) -> Iterator[None]:
    """Turns what the libraries say about a file into an error for users."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{file.path} cannot be read: {error.strerror}") from error
        raise DataError(
            f"{file.path} is damaged, or no {file.kind.capitalize()} file ({error}). Fetch or write it again"
        ) from error
