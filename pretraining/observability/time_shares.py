"""Into what a stretch of time divides: computing, communicating, waiting for data, nothing. Arithmetic only.

The parts overlap: a device may compute and communicate at once, and while the host waits for data the device may still
be busy with what came before. Each moment is counted once, as the first of these that it is:

    compute > communication > waiting for data > idle

So communication beside compute costs nothing and counts as compute; what is left of it is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Spans = list[tuple[float, float]]
"""Stretches of time as (start, end), in microseconds; ascending and disjoint."""


@dataclass(frozen=True)
class TimeShares:
    """Shares of a stretch of time; those of compute, exposed communication, data and idle add up to 1.

    Attributes:
        seconds: the whole stretch.
        compute: something was computed.
        exposed_communication: communicated, and nothing computed meanwhile.
        hidden_communication: communicated beside computing; a part of `compute`.
        data: waited for data, with nothing else to do.
        idle: none of these.
    """

    seconds: float
    compute: float
    exposed_communication: float
    hidden_communication: float
    data: float
    idle: float


def divide_time(
    window: tuple[float, float],
    compute: Iterable[tuple[float, float]],
    communication: Iterable[tuple[float, float]],
    data: Iterable[tuple[float, float]],
) -> TimeShares:
    """How a stretch of time divides.

    Args:
        window: the stretch, as (start, end) in microseconds; what lies outside does not count.
        compute: when something was computed; in any order, overlapping or not, as the others.
        communication: when something was communicated.
        data: when data was waited for.
    """
    computing, communicating, waiting = (unite(spans, window) for spans in (compute, communication, data))
    total = window[1] - window[0]
    exposed = subtract(communicating, computing)
    only_waiting = subtract(subtract(waiting, computing), communicating)
    parts = [length(spans) / total for spans in (computing, exposed, only_waiting)]
    return TimeShares(
        seconds=total / 1e6,
        compute=parts[0],
        exposed_communication=parts[1],
        hidden_communication=length(communicating) / total - parts[1],
        data=parts[2],
        idle=max(0.0, 1.0 - sum(parts)),
    )


def unite(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> Spans:
    """The same moments inside a window as ascending, disjoint spans."""
    united: Spans = []
    for start, end in sorted((max(start, window[0]), min(end, window[1])) for start, end in spans):
        if end <= start:
            continue
        if united and start <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], end))
        else:
            united.append((start, end))
    return united


def subtract(spans: Spans, others: Spans) -> Spans:
    """The moments of `spans` that are in none of `others`."""
    left: Spans = []
    position = 0
    for start, end in spans:
        while position < len(others) and others[position][1] <= start:
            position += 1
        place = position
        while place < len(others) and others[place][0] < end:
            if others[place][0] > start:
                left.append((start, others[place][0]))
            start = max(start, others[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Spans) -> float:
    """Sum of the spans' lengths, in microseconds."""
    return sum(end - start for start, end in spans)
