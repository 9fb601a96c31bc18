"""Ranges of whole numbers as users write them: A-B with both ends included, or A alone."""

from __future__ import annotations


def parse_range(text: str, smallest: int) -> tuple[int, int]:
    """The first and the last number of a range.

    Args:
        text: A-B or A.
        smallest: that A may be.

    Raises:
        ValueError: it is no range.
    """
    begin, _, end = text.partition("-")
    first, last = int(begin), int(end or begin)
    if not smallest <= first <= last:
        raise ValueError(text)
    return first, last
