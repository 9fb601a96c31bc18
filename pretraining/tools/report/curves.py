"""Curves of a million points, drawn honestly with a thousand: the lowest and the highest of each bucket stay.

    reports, a few thousand at a time --Thinner.add--> points that stay --Thinner.curve--> Curve

A bucket is a number of reports, a power of two, the smallest that gives at most `MOST_BUCKETS` of them. So whatever
stays of a part of a run holds all that stays of the whole, and a file is read in one pass with little memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_BUCKETS = 1000
"""A plot is about as many pixels wide."""


@dataclass(frozen=True)
class Curve:
    """The points of a number that are drawn.

    Attributes:
        rows: which report each is of, counted from 0, ascending, [points] int64.
        values: finite, [points] float64.
        total: how many points there were.
    """

    rows: NDArray[np.int64]
    values: NDArray[np.float64]
    total: int

    @property
    def is_thinned(self) -> bool:
        """Whether points were left out."""
        return len(self.rows) < self.total

    def lowest(self) -> int:
        """Returns the place of the lowest value, of all that there were."""
        return int(self.values.argmin())


def bucket_width(reports: int) -> int:
    """Returns the reports of a bucket, a power of two, for a run of so many."""
    width = 1
    while reports > width * MOST_BUCKETS:
        width *= 2
    return width


def places_to_keep(rows: NDArray[np.int64], values: NDArray[np.float64], width: int) -> NDArray[np.int64]:
    """Returns the places of the points that stay, ascending: first, last, lowest and highest of each bucket.

    Args:
        rows: ascending, at least one.
        values: finite.
        width: rows of a bucket.
    """
    buckets = rows // width
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    sizes = np.diff(starts, append=len(rows))
    lows = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, starts), sizes))
    highs = np.flatnonzero(values == np.repeat(np.maximum.reduceat(values, starts), sizes))
    # Of equal ones the first low and the last high.
    lows = lows[np.diff(buckets[lows], prepend=-1) != 0]
    highs = highs[np.diff(buckets[highs], append=-1) != 0]
    return np.unique(np.concatenate((lows, highs, [0, len(rows) - 1])))


class Thinner:
    """Takes the points of one number in the order of the file, and keeps few of them."""

    def __init__(self) -> None:
        self._rows = np.empty(0, np.int64)
        self._values = np.empty(0, np.float64)
        self._total = 0

    def add(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Adds points of later reports than all before; what is not finite is no point."""
        known = np.isfinite(values)
        self._total += int(known.sum())
        self._rows = np.concatenate((self._rows, rows[known]))
        self._values = np.concatenate((self._values, values[known]))
        if len(self._rows):
            kept = places_to_keep(self._rows, self._values, bucket_width(int(self._rows[-1]) + 1))
            self._rows, self._values = self._rows[kept], self._values[kept]

    def curve(self, reports: int) -> Curve | None:
        """Returns what is drawn of a run of so many reports; None where no value is known."""
        if not self._total:
            return None
        kept = places_to_keep(self._rows, self._values, bucket_width(reports))
        return Curve(self._rows[kept], self._values[kept], self._total)
