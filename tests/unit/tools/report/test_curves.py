"""Thinning curves: whatever is left out lies between what is kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.tools.report import curves
from pretraining.tools.report.curves import Curve, Thinner, bucket_width

VALUES = st.lists(st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([0.0, 1.0])), max_size=400)
MOST = 8
"""With so few buckets a short list is a long run."""


def thinned(values: list[float], rows: list[int] | None = None, pieces: int = 1) -> Curve | None:
    rows = list(range(len(values))) if rows is None else rows
    thinner = Thinner()
    size = max(1, math.ceil(len(values) / pieces))
    for begin in range(0, len(values), size):
        thinner.add(np.array(rows[begin : begin + size]), np.array(values[begin : begin + size]))
    return thinner.curve(rows[-1] + 1 if rows else 0)


@given(values=VALUES)
def test_extremes_ends_and_order_stay_and_the_number_is_bounded(values: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "MOST_BUCKETS", MOST)
        curve = thinned(values)
        finite = {row: value for row, value in enumerate(values) if math.isfinite(value)}
        if curve is None:
            assert not finite
            return
        assert curve.total == len(finite)
        assert len(curve.rows) <= 2 * MOST + 2
        assert (np.diff(curve.rows) > 0).all()
        assert all(finite[row] == value for row, value in zip(curve.rows.tolist(), curve.values.tolist(), strict=True))
        assert curve.rows[0] == min(finite) and curve.rows[-1] == max(finite)
        width = bucket_width(len(values))
        for begin in range(0, len(values), width):
            inside = [finite[row] for row in range(begin, begin + width) if row in finite]
            kept = curve.values[(curve.rows >= begin) & (curve.rows < begin + width)]
            if inside:
                assert (kept.min(), kept.max()) == (min(inside), max(inside))
        assert curve.values[curve.lowest()] == min(finite.values())


@given(values=VALUES, pieces=st.integers(1, 20))
def test_a_file_that_is_read_in_pieces_keeps_the_same_points(values: list[float], pieces: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "MOST_BUCKETS", MOST)
        whole, in_pieces = thinned(values), thinned(values, pieces=pieces)
        assert (whole is None) == (in_pieces is None)
        if whole is not None and in_pieces is not None:
            assert whole.rows.tolist() == in_pieces.rows.tolist() and whole.total == in_pieces.total
            assert whole.values.tolist() == in_pieces.values.tolist()


@given(rows=st.lists(st.integers(0, 10**6), unique=True, min_size=1, max_size=200).map(sorted))
def test_numbers_that_few_reports_have_keep_their_reports(rows: list[int]) -> None:
    curve = thinned([float(row) for row in rows], rows)
    assert curve is not None and set(curve.rows.tolist()) <= set(rows)
    assert curve.rows.tolist() == curve.values.astype(int).tolist()


def test_a_short_run_keeps_every_point() -> None:
    values = [math.sin(row) for row in range(2 * curves.MOST_BUCKETS)]
    curve = thinned(values)
    assert curve is not None and not curve.is_thinned and curve.values.tolist() == values


@given(reports=st.integers(1, 10**12))
def test_buckets_are_powers_of_two_and_no_larger_than_needed(reports: int) -> None:
    width = bucket_width(reports)
    assert width.bit_count() == 1 and reports <= width * curves.MOST_BUCKETS
    assert width == 1 or reports > width // 2 * curves.MOST_BUCKETS
