"""Formatting of numbers, lists and tables."""

from __future__ import annotations

import pytest

from pretraining.text import count_of, format_bytes, format_gib, format_seconds, format_table, list_some


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (count_of(1, "step"), "1 step"),
        (count_of(0, "step"), "0 steps"),
        (count_of(2000, "step"), "2,000 steps"),
        (count_of(2, "micro-batch"), "2 micro-batches"),
        (list_some([], 2), ""),
        (list_some(["a", 2], 2), "a, 2"),
        (list_some(range(1003), 2, "; "), "0; 1 and 1,001 more"),
        (format_bytes(1500), "1.5 kB"),
        (format_bytes(3.2e9), "3.2 GB"),
        (format_gib(12.5 * 2**30), "12.5 GiB"),
        (format_gib(310 * 2**20), "0.303 GiB"),
        (format_gib(-2048 * 2**30), "-2,048.0 GiB"),
        (format_seconds(59.4), "59s"),
        (format_seconds(61), "1m 01s"),
        (format_seconds(18420), "5h 07m"),
        (format_seconds(1050000), "12d 3h"),
    ],
)
def test_a_value_is_written_for_people(written: str, expected: str) -> None:
    assert written == expected


def test_columns_of_a_table_are_as_wide_as_their_widest_cell() -> None:
    assert format_table([("name", "n"), ("a", "10")], right=[1]) == ["name   n", "a     10"]
