"""Reader of documents in Parquet and Arrow files: one column, a document per row.

A column of strings holds text; a column of integer lists holds token ids, which are kept unchanged. A null is an empty
document. Only this column is read, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pretraining.errors import DataError
from pretraining.tools.prepare.documents import Document
from pretraining.tools.prepare.inputs import InputFile

ROWS_AT_ONCE = 128
"""Few enough that rows of megabytes fit into memory, enough that short rows have little overhead."""
_READ_BYTES = 1 << 20
_TEXT_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
_LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def read_table(file: InputFile, column: str, begin: int = 0, end: int | None = None) -> Iterator[Document]:
    """Yield the documents of a table, from row group (Parquet) or record batch (Arrow) `begin` to `end`, excluded.

    Raises:
        DataError: the file cannot be read, or the column is missing or holds something else.
    """
    path, row = str(file.path), 0
    with _open_table(file, column) as table:
        if isinstance(table, pq.ParquetFile):
            row = sum(_rows_of_groups(table)[:begin])
            groups = range(begin, table.num_row_groups if end is None else end)
            batches = table.iter_batches(ROWS_AT_ONCE, groups, [column], use_threads=False) if groups else ()
            row_bytes = file.size / max(table.metadata.num_rows, 1)
            sized = ((batch, row_bytes * len(batch)) for batch in batches)
        elif isinstance(table, pa.RecordBatchFileReader):
            path = f"{path} from record batch {begin}" if begin else path
            numbers = range(begin, table.num_record_batches if end is None else end)
            sized = ((table.get_batch(number), file.size / table.num_record_batches) for number in numbers)
        else:  # a stream
            sized = ((batch, 0.0) for batch in table)
        for batch, size in sized:
            rows = batch.column(0)
            for at in range(0, len(rows), ROWS_AT_ONCE):
                some = rows.slice(at, ROWS_AT_ONCE)
                yield from documents_of_rows(some, column, path, row + at, int(size * len(some) / len(rows)))
            row += len(rows)


def column_type(file: InputFile, column: str) -> pa.DataType:
    """Return the type of a table's column; raise a DataError if it is missing or the file cannot be read."""
    with _open_table(file, column) as table:
        return field_type(_schema_of(table), column, file.path)


def ranges_of_table(file: InputFile, wanted_bytes: int) -> list[tuple[int, int | None, int]]:
    """Cut a table into ranges (begin, end, bytes) of about `wanted_bytes` on disk; a stream is one range.

    Raises:
        DataError: the file cannot be read.
    """
    weights: list[int] = []  # a stream has no list of record batches
    with _open_table(file) as table:
        if isinstance(table, pq.ParquetFile):
            weights = _rows_of_groups(table)
        elif isinstance(table, pa.RecordBatchFileReader):
            weights = [1] * table.num_record_batches
    pieces = min(len(weights), -(-file.size // wanted_bytes))
    if pieces < 2:
        return [(0, None, file.size)]
    ends = np.cumsum(weights)
    total = max(int(ends[-1]), 1)
    # Range i begins after the last group that ends within the first i/pieces of the rows; a set drops empty ranges.
    cuts = sorted({0, len(weights), *(int(np.searchsorted(ends, total * i // pieces, "right")) for i in range(pieces))})
    bytes_before = [0, *(int(end) * file.size // total for end in ends)]
    return [(begin, end, bytes_before[end] - bytes_before[begin]) for begin, end in pairwise(cuts)]


def field_type(schema: pa.Schema, column: str, path: str | Path) -> pa.DataType:
    """Return the type of a column; raise a DataError if no column or several columns have this name."""
    if schema.names.count(column) != 1:
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in schema) or "none"
        count = "several columns" if column in schema.names else "no column"
        raise DataError(f"{count} {column!r}. The columns are: {columns}; set --text_field", path=path)
    return schema.field(column).type


def token_type(kind: pa.DataType, column: str, path: str | Path) -> pa.DataType | None:
    """Return the type of the token ids in a column, or None for text; raise a DataError for other types."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if any(is_text(value) for is_text in _TEXT_TYPES):
        return None
    if any(is_list(kind) for is_list in _LIST_TYPES) and pa.types.is_integer(kind.value_type):
        return kind.value_type
    expected = "neither text (string) nor token ids (lists of integers)"
    raise DataError(f"column {column!r} holds {kind}, {expected}. Set another --text_field", path=path)


def documents_of_rows(rows: pa.Array, column: str, path: str, first_row: int, bytes_read: int) -> Iterator[Document]:
    """Yield the documents of some rows of a column.

    Args:
        first_row: number of the first row, for messages.
        bytes_read: size of the rows on disk.

    Raises:
        DataError: a row is not UTF-8, or has null tokens.
    """
    read_rows = _texts if token_type(rows.type, column, path) is None else _token_lists
    for row, content in enumerate(read_rows(rows, path, first_row), start=first_row):
        yield Document(content, bytes_read, path, row)
        bytes_read = 0


def _texts(rows: pa.Array, path: str, first_row: int) -> Iterator[str | np.ndarray]:
    for row, scalar in enumerate(rows, start=first_row):
        try:
            yield scalar.as_py() or ""
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8 ({error}). Write the file again with valid text", path=path, row=row) from error


def _token_lists(rows: pa.Array, path: str, first_row: int) -> Iterator[str | np.ndarray]:
    lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False)
    values = rows.flatten()  # skips values under null rows
    ends = np.cumsum(lengths)
    if values.null_count:
        missing = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        row = first_row + int(np.searchsorted(ends, missing, side="right"))
        raise DataError("a token is missing (null). Write the file again without it", path=path, row=row)
    tokens = values.to_numpy(zero_copy_only=False)
    for begin, end in zip(ends - lengths, ends, strict=True):
        yield tokens[begin:end]


def _rows_of_groups(table: pq.ParquetFile) -> list[int]:
    return [table.metadata.row_group(number).num_rows for number in range(table.num_row_groups)]


def _schema_of(table: Any) -> pa.Schema:
    return table.schema_arrow if isinstance(table, pq.ParquetFile) else table.schema


@contextmanager
def _open_table(file: InputFile, column: str | None = None) -> Iterator[Any]:
    """Open a table, or one column of it, as a ParquetFile or an Arrow reader.

    Raises:
        DataError: the column is missing, or the file cannot be read, also inside the `with` block.
    """
    try:
        with ExitStack() as stack:
            if file.kind == "parquet":
                # These two options read a column page by page rather than a row group at once.
                table = stack.enter_context(pq.ParquetFile(file.path, buffer_size=_READ_BYTES, pre_buffer=False))
            else:
                with file.path.open("rb") as opened:
                    open_arrow = pa.ipc.open_file if opened.read(6) == b"ARROW1" else pa.ipc.open_stream
                table = stack.enter_context(open_arrow(pa.memory_map(str(file.path))))
            if column is not None:
                field_type(_schema_of(table), column, file.path)
            if column is not None and file.kind != "parquet":
                # Keeps Arrow from unpacking other columns that are compressed.
                options = pa.ipc.IpcReadOptions(included_fields=[table.schema.get_field_index(column)])
                table = stack.enter_context(open_arrow(pa.memory_map(str(file.path)), options=options))
            yield table
    except (pa.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"it is not a readable {file.kind} file ({reason})"
        raise DataError(f"{problem}. Fetch or write it again", path=file.path) from error
