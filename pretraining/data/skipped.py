"""Samples that a run leaves out: ranges of global indices, such as those of batches that made the loss diverge.

A sample keeps its index, and its dataset keeps the sample, whether it is skipped or not: steps take the indices that
are left, in order. So leaving out what is still to come changes nothing of what was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Skipped:
    """Ranges of samples that are left out.

    Args:
        ranges: (first, end) of each; they may overlap.

    Attributes:
        ranges: the same samples in as few ranges as possible, ascending.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for begin, end in sorted((begin, end) for begin, end in ranges if begin < end):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((begin, end))
        self.ranges = tuple(merged)

    def advance(self, sample: int, count: int) -> int:
        """The sample that is taken `count` samples after the first one that is taken at or after `sample`."""
        for begin, end in self.ranges:
            if end <= sample:
                continue
            if sample + count < begin:
                break
            count -= max(begin - sample, 0)
            sample = end
        return sample + count

    def taken(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of [begin, end) that are taken, ascending; none is empty."""
        for skipped_begin, skipped_end in self.ranges:
            if begin < min(skipped_begin, end):
                yield begin, min(skipped_begin, end)
            begin = max(begin, skipped_end)
        if begin < end:
            yield begin, end

    def count(self, begin: int, end: int) -> int:
        """How many samples of [begin, end) are taken."""
        return sum(last - first for first, last in self.taken(begin, end))

    def without(self, other: Skipped) -> list[tuple[int, int]]:
        """The ranges, or parts of them, that another one has not."""
        return [part for begin, end in self.ranges for part in other.taken(begin, end)]
