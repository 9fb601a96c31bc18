"""Which column of an Arrow IPC file holds the tokens, and where its parts stand in the metadata of record batches.

Footers of files that one writer made are equal apart from the positions of their record batches. These are blanked out
(`Footer.schema`) before the schema is parsed, so that the place of a column is a pure function of the bytes that are
left, and is found once for all the files that share them.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import pyarrow as pa

from pretraining.data.arrow_metadata import MAGIC, ColumnPlace
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

_REMEMBERED_BYTES = 1 << 14
"""A schema is remembered where its footer is not longer; 1024 of them are."""


def locate_column(path: str, schema: bytes, column: str) -> ColumnPlace:
    """Find the column of the tokens.

    Args:
        path: of the file, for messages.
        schema: its `Footer.schema`.
        column: name.

    Raises:
        DataError: the schema is damaged, has no such column, or one that cannot be read in place.
    """
    locate = _locate if len(schema) <= _REMEMBERED_BYTES else _locate.__wrapped__
    try:
        return locate(schema, column)
    except DataError as problem:
        raise DataError(f"{path} {problem}") from problem


@lru_cache(maxsize=1024)
def _locate(schema_bytes: bytes, column: str) -> ColumnPlace:
    schema = _parse(schema_bytes)
    names = schema.names
    if column not in names:
        raise DataError(f"has no column '{column}', but {', '.join(names) or 'none at all'}: give --col_name")
    kind = schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    width = TOKEN_WIDTHS.get(kind.value_type if is_list else kind)
    if width is None:
        raise DataError(
            f"has a column '{column}' of type {kind}, but documents are lists of integers, such as list<uint16>"
        )
    node = buffer = 0
    for field in schema:
        if field.name == column:
            break
        nodes, buffers = _parts(field.type)
        node, buffer = node + nodes, buffer + buffers
    return ColumnPlace(node, buffer, (8 if pa.types.is_large_list(kind) else 4) if is_list else 0, width)


def _parse(schema: bytes) -> pa.Schema:
    """The library reads it, and checks the footer meanwhile, as that of a file without anything else."""
    file = b"".join((MAGIC, b"\0\0", schema, struct.pack("<i", len(schema)), MAGIC))
    try:
        return pa.ipc.open_file(pa.BufferReader(file)).schema
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"is damaged: {error}") from error


def _parts(kind: pa.DataType) -> tuple[int, int]:
    """How many field nodes and buffers a column of a type has, with its children's."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(kind.storage_type)
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
            f"has a column of type {kind} before the tokens, which is not supported: write the tokens first"
        )
    parts = [own, *(_parts(child) for child in children)]
    return sum(nodes for nodes, _ in parts), sum(buffers for _, buffers in parts)
