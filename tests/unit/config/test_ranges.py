from __future__ import annotations

import pytest

from pretraining.config.values import parse_range


@pytest.mark.parametrize(("text", "expected"), [("3-7", (3, 7)), ("5", (5, 5)), ("0-0", (0, 0)), ("5-", (5, 5))])
def test_both_ends_are_included_and_a_number_alone_is_both(text: str, expected: tuple[int, int]) -> None:
    assert parse_range(text, smallest=0) == expected


@pytest.mark.parametrize("text", ["", "-", "7-3", "-1", "a-b", "1-2-3", "1.5"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_range(text, smallest=0)


def test_a_range_begins_no_earlier_than_it_may() -> None:
    with pytest.raises(ValueError, match="0-2"):
        parse_range("0-2", smallest=1)
