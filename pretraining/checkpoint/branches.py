"""Branches of a run: the returns and rollbacks on the way to a checkpoint. Each manifest holds them.

    train to step 40              steps 10 .. 40     (1, 0, a)
    return to step 20, train      steps 30, 40       (1, 0, a) (2, 21, b)
    roll back to step 30, train   steps 30 .. 50     (1, 0, a) (2, 21, b) (3, 30, c)

So two manifests tell whether one checkpoint continues the other, whatever was removed between them. A branch gets a
number above all that its start finds, in the run's folder and in its mirror, so no clock is needed to tell which of two
returns came later. Checkpoints of earlier versions have no branches.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol


class Branch(NamedTuple):
    """Part of a run, up to the next return or rollback.

    Attributes:
        first_step: first step of its checkpoints. A rollback saves its target again; a return does not.
    """

    number: int
    first_step: int
    id: str


Branches = tuple[Branch, ...]


class Point(Protocol):
    """Checkpoint or manifest."""

    @property
    def step(self) -> int:
        """Number of updates before the checkpoint."""

    @property
    def branches(self) -> Branches:
        """Branches up to the checkpoint, the first one first."""


def parse_branches(values: Any) -> Branches:
    """Return the branches in a manifest; none if they are missing or no branches."""
    try:
        found = tuple(Branch(*each) for each in values)
    except TypeError:
        return ()
    kinds = tuple(map(type, Branch(0, 0, "")))
    return found if all(tuple(map(type, each)) == kinds for each in found) else ()


def number_of(point: Point) -> int:
    """Return the number of a checkpoint's branch; 0 without branches."""
    return point.branches[-1].number if point.branches else 0


def continues(later: Point, earlier: Point) -> bool:
    """Return whether a checkpoint is another one, or was trained from it."""
    shared = len(earlier.branches)
    if later.branches[:shared] != earlier.branches:
        return False
    following = later.branches[shared:]
    return earlier.step < following[0].first_step if following else earlier.step <= later.step


def latest_number(points: Iterable[Point]) -> int:
    """Return the number of the newest branch; 0 without branches."""
    return max(map(number_of, points), default=0)


def branches_from(start: Point | None, known: Collection[Point], first_step: int, *, is_return: bool) -> Branches:
    """Return the branches of the checkpoints that a start will save.

    Args:
        start: checkpoint of the run to start from; None = the run begins.
        known: all checkpoints of the run, those set aside included, except damaged ones that the start skips.
        first_step: first step of a new branch.
        is_return: whether the start is a return or a rollback. Another start begins a branch only if a checkpoint of
            this branch or of a later one would be taken for one that continues the start.
    """
    before = () if start is None else start.branches
    if start is not None and not before:  # an earlier version may have saved it, between starts of this version
        before = max((each for each in known if each.step < start.step), key=number_of, default=start).branches
    elif start is not None and not is_return:
        left = [each for each in known if not continues(start, each)]
        if latest_number(left) < number_of(start):
            return before
    return (*before, Branch(latest_number(known) + 1, first_step, secrets.token_hex(4)))
