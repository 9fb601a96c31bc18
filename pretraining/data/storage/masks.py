"""Columns beside the tokens that mask some of them: padding, or texts that other tools do not learn from.

Training reads all tokens of a row, so a start, `prepare` and `verify` name a column that masks tokens, and the way on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pretraining.data.storage.arrow import MAGIC
from pretraining.data.storage.index_build import strip_ends

MASKS = {
    **dict.fromkeys(("attention_mask", "loss_mask", "assistant_masks", "completion_mask"), 0),
    "labels": -100,
}
"""Names of columns, and the value that masks a token."""
ROWS_AT_ONCE = 1000
_MOST_PADDINGS = 2


def rows_of(path: str | Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file or stream, at most `ROWS_AT_ONCE` at a time."""
    with pa.memory_map(str(path)) as content:
        is_file = content.read(len(MAGIC)) == MAGIC
        content.seek(0)
        table = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
        batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
        for batch in batches:
            yield from (batch.slice(begin, ROWS_AT_ONCE) for begin in range(0, len(batch), ROWS_AT_ONCE))


def describe_masks(batches: Iterable[pa.RecordBatch], column: str, strip_tokens: Collection[int] = ()) -> str | None:
    """Return how other columns mask tokens of a column, and the way on; None if they mask none that training reads.

    Args:
        strip_tokens: tokens that training removes at both ends of a row.
    """
    masks = {name: _Mask() for name in MASKS}
    row = 0
    for batch in batches:
        for name, mask in masks.items():
            if {name, column} <= {*batch.schema.names} and name != column:
                mask.add(batch.column(column), batch.column(name), MASKS[name], row)
        row += len(batch)
    name, worst = max(masks.items(), key=lambda each: each[1].count)
    if not worst.count or (worst.is_padding and worst.tokens <= {*strip_tokens}):
        return None
    remedy = "there is no setting that reads such a column: leave these tokens out where the rows are made"
    if worst.is_padding:
        tokens = ",".join(map(str, sorted(worst.tokens)))
        remedy = f"--strip_tokens={tokens} removes them at both ends of a document"
    return (
        f"its column {name!r} masks {worst.count / worst.total:.1%} of the tokens that were looked at, first in row "
        f"{worst.first_row}, but training learns from all tokens; {remedy}"
    )


@dataclass
class _Mask:
    """Number of tokens that a column masks, of `total`; whether all of them are at the ends of rows."""

    count: int = 0
    total: int = 0
    first_row: int = 0
    are_at_ends: bool = True
    tokens: set[int] = field(default_factory=set)

    @property
    def is_padding(self) -> bool:
        """Whether removing a few tokens at the ends of rows removes all that is masked."""
        return self.are_at_ends and len(self.tokens) <= _MOST_PADDINGS

    def add(self, ids: pa.Array, mask: pa.Array, masked: int, first_row: int) -> None:
        """Add some rows, of which the first has this number; ignore columns that are no masks of these tokens."""
        if not all(pa.types.is_nested(each.type) and hasattr(each, "flatten") for each in (ids, mask)):
            return
        lengths, mask_lengths = (pc.fill_null(pc.list_value_length(each), 0).to_numpy(False) for each in (ids, mask))
        values, kept = (each.flatten() for each in (ids, mask))
        is_number = all(pa.types.is_integer(each.type) or pa.types.is_boolean(each.type) for each in (values, kept))
        if not is_number or not np.array_equal(lengths, mask_lengths):
            return
        is_masked = pc.fill_null(pc.cast(kept, pa.int64()), masked).to_numpy(False) == masked
        ends = np.cumsum(lengths, dtype=np.int64)
        begins = ends - lengths
        self.total += len(is_masked)
        if not is_masked.any():
            return
        if not self.count:
            self.first_row = first_row + int(np.searchsorted(ends, np.argmax(is_masked), side="right"))
        self.count += int(is_masked.sum())
        self.tokens |= {*np.unique(pc.fill_null(values, 0).to_numpy(False)[is_masked])[: _MOST_PADDINGS + 1].tolist()}
        begins, ends = strip_ends(is_masked.astype(np.uint8), begins, ends, {1})
        before = np.concatenate(([0], np.cumsum(is_masked)))
        self.are_at_ends &= bool((before[ends] == before[begins]).all())
