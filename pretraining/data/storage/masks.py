"""Columns beside the tokens that mask some of them: padding, or texts that other tools do not learn from.

Training reads all tokens of a row, so a start, `prepare` and `verify` name a column that masks tokens, and the way on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pretraining.data.storage.arrow import MAGIC
from pretraining.data.storage.token_format import read_bytes
from pretraining.errors import DataError

MASKS = {
    **dict.fromkeys(("attention_mask", "loss_mask", "assistant_masks", "completion_mask"), 0),
    "labels": -100,
}
"""Names of columns, and the value that masks a token."""
ROWS_AT_ONCE = 1000
_MOST_PADDINGS = 2


def rows_of(path: str | Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file or stream, at most `ROWS_AT_ONCE` at a time."""
    content = pa.py_buffer(read_bytes(str(path)))
    is_file = content[: len(MAGIC)].to_pybytes() == MAGIC
    table = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
    for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
        yield from (batch.slice(begin, ROWS_AT_ONCE) for begin in range(0, len(batch), ROWS_AT_ONCE))


def describe_masks(batches: Iterable[pa.RecordBatch], column: str, strip_tokens: Collection[int] = ()) -> str | None:
    """Return how another column masks tokens of a column, and the way on; None if none masks any that training reads.

    Args:
        strip_tokens: tokens that training removes at both ends of a row.
    """
    masked: Counter[str] = Counter()
    tokens, total = defaultdict[str, set[int]](set), 0
    damage = (pa.ArrowException, DataError, OSError, ValueError, MemoryError, SystemError)
    with suppress(*damage):  # which the reader of the tokens names
        for batch in batches:
            ids = _values(batch, column)
            total += 0 if ids is None else len(ids)
            for name, value in MASKS.items():
                mask = _values(batch, name)
                if name != column and ids is not None and mask is not None and len(mask) == len(ids):
                    masked[name] += int((mask == value).sum())
                    tokens[name] |= {*np.unique(ids[mask == value])[: _MOST_PADDINGS + 1].tolist()}
    name, count = max(masked.items(), key=lambda each: each[1], default=("", 0))
    if not count or tokens[name] <= {*strip_tokens}:
        return None
    remedy = "no setting reads such a column: leave these tokens out where the rows are made"
    if len(tokens[name]) <= _MOST_PADDINGS:
        padding = ",".join(map(str, sorted(tokens[name])))
        remedy = f"train with --strip_tokens={padding}, which removes padding at both ends of a document"
    return (
        f"its column {name!r} masks {count / total:.1%} of the tokens that were looked at, but training learns from "
        f"all tokens: {remedy}"
    )


def _values(batch: pa.RecordBatch, name: str) -> np.ndarray | None:
    """Return the numbers in a column of lists; None if it holds something else."""
    column = batch.column(name) if batch.schema.names.count(name) == 1 else None
    if column is None or not pa.types.is_nested(column.type):
        return None
    column.validate(full=True)  # pyarrow may end the process on damaged lists
    values = column.flatten()
    if isinstance(values, pa.Array) and (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        return np.asarray(pc.fill_null(pc.cast(values, pa.int64(), safe=False), 0).to_numpy(False))
    return None
