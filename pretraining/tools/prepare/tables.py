"""Reader of documents in Parquet and Arrow files: one column, a document per row.

A column of strings, or of UTF-8 as bytes, holds text; a column of integer lists holds token ids, which are kept
unchanged. A null is an empty document. Only this column is read, a few rows at a time.
"""

from __future__ import annotations

import json
import shlex
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
from pretraining.tools.prepare.packed_files import InputFile

PARQUET, ARROW = "Parquet", "Arrow"
"""Formats of input files."""
ROWS_AT_ONCE = 128
"""Few enough that rows of megabytes fit into memory, enough that short rows have little overhead."""
_READ_BYTES = 1 << 20
_CONVERTED = "converted"
_STRING_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BYTES_TYPES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)  # Parquet without annotation
_TEXT_TYPES = (*_STRING_TYPES, *_BYTES_TYPES, pa.types.is_null)
_LIST_VIEWS = (pa.types.is_list_view, pa.types.is_large_list_view)
_LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, *_LIST_VIEWS)


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
        inside = _path_of(column, _schema_of(table).names)[1:]
        for batch, size in sized:
            rows = pc.struct_field(batch.column(0), inside) if inside else batch.column(0)
            rows.validate(full=_is_list(rows.type))  # pyarrow may end the process on damaged lists
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


def _path_of(column: str, names: list[str]) -> list[str]:
    """Return the column and the fields inside it that a name means: a dotted one reaches into structs."""
    parts = column.split(".")
    return [column] if column in names or parts[0] not in names else parts


def field_type(schema: pa.Schema, column: str, path: str | Path) -> pa.DataType:
    """Return the type of a column; raise a DataError if no column or several columns have this name."""
    name, *inside = _path_of(column, schema.names)
    kind = schema.field(name).type if schema.names.count(name) == 1 else None
    for part in inside:
        if kind is not None:
            is_there = pa.types.is_struct(kind) and kind.get_field_index(part) >= 0
            kind = kind.field(part).type if is_there else None
    if kind is None:
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in schema) or "none"
        count = "several columns" if column in schema.names else "no column"
        raise DataError(f"{count} {column!r}. The columns are: {columns}; set --text_field", path=path)
    return kind


def token_type(kind: pa.DataType, column: str, path: str | Path) -> pa.DataType | None:
    """Return the type of the token ids in a column, or None for text and chats; raise a DataError for other types."""
    kind = _stored_type(kind)
    if _is_text(kind) or holds_chats(kind):
        return None
    if _is_list(kind) and pa.types.is_integer(kind.value_type):
        return kind.value_type
    problem = f"column {column!r} holds {kind}, neither text (string, binary) nor token ids (lists of integers)"
    raise DataError(f"{problem}. {_remedy(kind, column, Path(path))}", path=path)


def holds_chats(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists of messages, objects with a role."""
    kind = _stored_type(kind)
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return _is_list(kind) and _is_json(kind.value_type)
    return bool(kind.value_type.get_field_index("role") >= 0)


def _is_json(kind: pa.DataType) -> bool:
    """Return whether values are JSON, in which `datasets` keeps messages of unlike types."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _parse_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value of a column with all JSON in it parsed."""
    if value is not None and _is_json(kind):
        return json.loads(value)
    if value is not None and _is_list(kind):
        return [_parse_json(item, kind.value_type) for item in value]
    if value is not None and pa.types.is_struct(kind):
        return {field.name: _parse_json(value[field.name], field.type) for field in kind}
    return value


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values; dictionaries, run ends and extension types are ways to store them."""
    if isinstance(kind, pa.BaseExtensionType):
        return _stored_type(kind.storage_type)
    is_encoded = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind)
    return _stored_type(kind.value_type) if is_encoded else kind


def _is_text(kind: pa.DataType) -> bool:
    return any(is_text(kind) for is_text in _TEXT_TYPES)


def _is_list(kind: pa.DataType) -> bool:
    return any(is_list(kind) for is_list in _LIST_TYPES)


def _remedy(kind: pa.DataType, column: str, path: Path) -> str:
    """Return the command that makes text or chats of a nested column, or another way on."""
    row, value = f"row[{json.dumps(column)}]", kind.value_type if _is_list(kind) else None
    if value is not None and _is_text(value):
        made = f'"\\n".join({row})'
    elif value is not None and pa.types.is_struct(value) and {"from", "value"} <= {field.name for field in value}:
        role = '{"human": "user", "gpt": "assistant"}.get(each["from"], each["from"])'
        made = f'[{{"role": {role}, "content": each["value"]}} for each in {row}]'
    else:
        return "Set another --text_field; --text_field=a.b reads the field b of a struct a"
    source = json.dumps("parquet" if path.name.endswith(".parquet") else "arrow")
    program = (
        f"from datasets import load_dataset; load_dataset({source}, data_files={json.dumps(str(path))}, "
        f'split="train").map(lambda row: {{"{_CONVERTED}": {made}}}).to_parquet("{_CONVERTED}.parquet")'
    )
    then = f"and read that with --input_path={_CONVERTED}.parquet --text_field={_CONVERTED}"
    return f"Set another --text_field, or convert it, {then}: python -c {shlex.quote(program)}"


def documents_of_rows(rows: pa.Array, column: str, path: str, first_row: int, bytes_read: int) -> Iterator[Document]:
    """Yield the documents of some rows of a column; a row that is not UTF-8, or has null tokens, has a fault.

    Args:
        first_row: number of the first row, for messages.
        bytes_read: size of the rows on disk.

    Raises:
        DataError: the column holds something else.
    """
    is_text = token_type(rows.type, column, path) is None
    rows = rows.storage if isinstance(rows, pa.ExtensionArray) else rows
    contents: Iterator[tuple[str | np.ndarray | list[Any], str]] = _texts(rows) if is_text else _token_lists(rows)
    for row, (content, fault) in enumerate(contents, start=first_row):
        yield Document(content, bytes_read, path, row, True, fault)
        bytes_read = 0


def _texts(rows: pa.Array) -> Iterator[tuple[str | np.ndarray | list[Any], str]]:
    """Yield the text or the chat of each row and its fault, one of them empty."""
    try:
        contents = rows.to_pylist()
    except UnicodeDecodeError:
        contents = rows  # scalars, of which some fail below
    for content in contents:
        try:
            text = content.as_py() if isinstance(content, pa.Scalar) else content
            if isinstance(text, list):
                text = _parse_json(text, _stored_type(rows.type))
            text = text.decode("utf-8") if isinstance(text, bytes) else text
            yield text or "", "a chat without messages" if text == [] else ""
        except UnicodeDecodeError as error:
            yield "", f"not UTF-8 ({error}). Write the file again with valid text"
        except (ValueError, RecursionError) as error:
            yield "", f"not valid JSON ({error})"


def _token_lists(rows: pa.Array) -> Iterator[tuple[str | np.ndarray | list[Any], str]]:
    """Yield the token ids of each row and its fault, one of them empty."""
    lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False)
    values = rows.flatten()  # skips values under null rows
    ends = np.cumsum(lengths)
    missing = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    tokens = (values.fill_null(0) if values.null_count else values).to_numpy(zero_copy_only=False)
    for begin, end in zip(ends - lengths, ends, strict=True):
        if missing is not None and missing[begin:end].any():
            yield tokens[:0], "a token is missing (null). Write the file again without it"
        else:
            yield tokens[begin:end], ""


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
            if file.format == PARQUET:
                # These two options read a column page by page rather than a row group at once.
                table = stack.enter_context(pq.ParquetFile(file.path, buffer_size=_READ_BYTES, pre_buffer=False))
            else:
                with file.path.open("rb") as opened:
                    open_arrow = pa.ipc.open_file if opened.read(6) == b"ARROW1" else pa.ipc.open_stream
                table = stack.enter_context(open_arrow(pa.memory_map(str(file.path))))
            if column is not None:
                field_type(_schema_of(table), column, file.path)
            if column is not None and file.format != PARQUET:
                # Keeps Arrow from unpacking other columns that are compressed.
                first = _path_of(column, table.schema.names)[0]
                options = pa.ipc.IpcReadOptions(included_fields=[table.schema.get_field_index(first)])
                table = stack.enter_context(open_arrow(pa.memory_map(str(file.path)), options=options))
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or error or "damaged"
        problem = f"it is not a readable {file.format} file ({reason})"
        raise DataError(f"{problem}. Fetch or write it again", path=file.path) from error
