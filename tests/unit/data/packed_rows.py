"""Rows of several documents, for tests of batches."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

from pretraining.data.batch import MicroBatch

Row = list[int]
"""Lengths of the pieces of documents in a row; what they leave of it is padding."""


@st.composite
def packed_rows(draw: st.DrawFn) -> tuple[int, list[Row]]:
    """S + 1, and rows: full, partly filled, or empty."""
    width = draw(st.integers(2, 12))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        filled = draw(st.one_of(st.just(width), st.integers(0, width)))
        cuts = draw(st.sets(st.integers(1, filled - 1))) if filled > 1 else set()
        rows.append([end - begin for begin, end in pairwise([0, *sorted(cuts), filled])] if filled else [])
    return width, rows


def pack(width: int, rows: list[Row], document_mask: bool = True, vocab_size: int = 1000) -> MicroBatch:
    """Rows of S + 1 tokens that count upwards over the whole batch; padding is 0."""
    tokens = torch.arange(1, len(rows) * width + 1, dtype=torch.int32).remainder(vocab_size).view(-1, width)
    starts = []
    for number, row in enumerate(rows):
        tokens[number, sum(row) :] = 0
        begins = {0, *(sum(row[:count]) for count in range(len(row) + 1))}  # the last is the start of padding
        starts += [number * width + begin for begin in sorted(begins) if begin < width]
    lengths = torch.tensor([sum(row) for row in rows], dtype=torch.int32)
    return MicroBatch(
        tokens,
        None if (lengths == width).all() else lengths,
        torch.tensor(starts, dtype=torch.int32) if document_mask else None,
    )
