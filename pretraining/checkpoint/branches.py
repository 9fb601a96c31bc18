"""Branches of a run: one rule for what belongs to it, pure functions of what manifests record.

Every start that trains begins a branch. A manifest lists the branches up to its checkpoint:

    train to step 40              steps 10 .. 40     (1, 0, a)
    the next start, to step 60    steps 50, 60       (1, 0, a) (2, 40, b)
    return to step 20, train      steps 20, 30       (1, 0, a) (3, 20, c), not plain

So two manifests tell whether one checkpoint continues the other, whatever was removed between them. A branch has a
number above all that its start finds, so no clock tells which of two branches is the newer one.

    folder -> newest there --+
                             +-> `newest`: the run's newest checkpoint -> `own`: those that it continues
    mirror -> newest there --+

Starts, returns, rollbacks, retention, the mirror and all commands that look at a run ask these functions.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar


class Seen(NamedTuple):
    """Newest checkpoint in the mirror when a branch began: number and id of its branch, and its step."""

    number: int
    id: str
    step: int


class Branch(NamedTuple):
    """Part of a run that one start has trained.

    Attributes:
        begin: step at which it began. The branch before it counts up to this step, inclusive.
        is_plain: whether it began at the newest checkpoint that its start saw, so that it gave up nothing.
        seen: None = the mirror was empty, or the run had none.
    """

    number: int
    begin: int
    id: str
    is_plain: bool = True
    seen: Seen | None = None


Branches = tuple[Branch, ...]


class Point(Protocol):
    """Checkpoint or manifest."""

    @property
    def step(self) -> int:
        """Number of updates before the checkpoint."""

    @property
    def branches(self) -> Branches:
        """Branches up to the checkpoint, the first one first; empty if no run has saved it."""


AnyPoint = TypeVar("AnyPoint", bound=Point)


def parse_branches(values: Any) -> Branches:
    """Return the branches in a manifest; raise a TypeError if a value has another type."""
    branches = tuple(
        Branch(number, begin, identity, is_plain, None if seen is None else Seen(*seen))
        for number, begin, identity, is_plain, seen in values
    )
    for branch in branches:
        types = [type(value) for value in (*branch[:4], *(branch.seen or Seen(0, "", 0)))]
        if types != [int, int, str, bool, int, str, int]:
            raise TypeError(f"{branch} is no branch")
    return branches


def number_of(point: Point) -> int:
    """Return the number of the branch that saved a checkpoint; 0 without branches."""
    return point.branches[-1].number if point.branches else 0


def identity_of(point: Point) -> tuple[str, int]:
    """Return what no other checkpoint of the run has: the id of its branch, and its step."""
    return point.branches[-1].id if point.branches else "", point.step


def age_in_place(point: Point) -> tuple[int, int]:
    """Return the key that is highest in the newest checkpoint of one place."""
    return number_of(point), point.step


def continues(later: Point, earlier: Point) -> bool:
    """Return whether a checkpoint is another one, or was trained from it."""
    following = later.branches
    if earlier.branches:
        ids = [branch.id for branch in following]
        if earlier.branches[-1].id not in ids:
            return False
        following = following[ids.index(earlier.branches[-1].id) + 1 :]
    return earlier.step <= (following[0].begin if following else later.step)


def is_given_up(point: Point, newest: Point) -> bool:
    """Return whether a run whose newest checkpoint is `newest` has gone another way than to this checkpoint.

    A checkpoint that continues the newest one is damaged, or it would be newer: nobody has given it up.
    """
    return not continues(newest, point) and not continues(point, newest)


def newest(folder: Iterable[AnyPoint], mirror: Iterable[AnyPoint]) -> AnyPoint | None:
    """Return the newest checkpoint of a run, of the good ones in its folder and its mirror; None if there are none.

    If neither of the two newest ones continues the other, two machines have trained the run. If both only resumed
    it, more steps win. Otherwise one has gone back: the folder wins if it has seen what the mirror holds.
    """
    here, there = (max(points, key=age_in_place, default=None) for points in (folder, mirror))
    if here is None or there is None:
        return there if here is None else here
    if continues(here, there):
        return here
    if continues(there, here):
        return there
    if all(branch.is_plain for branch in (*_beyond(here, there), *_beyond(there, here))):
        return max(there, here, key=lambda point: point.step)
    return here if any(_has_seen(branch, there) for branch in here.branches) else there


def own(newest: Point, points: Iterable[AnyPoint]) -> list[AnyPoint]:
    """Return the checkpoints that belong to a run, given its newest one; the others were given up."""
    return [point for point in points if continues(newest, point)]


def begin_branch(
    start: Point | None, step: int, known: Collection[Point], *, above: int, is_plain: bool, seen: Point | None
) -> Branches:
    """Return the branches of the checkpoints that a start will save.

    Branches of which no place holds a checkpoint go. The next branch takes over their begin, and whether they gave up
    anything. A start that does not see the mirror of its run keeps all branches.

    Args:
        start: checkpoint of the run to start from; None = the run begins.
        step: step of the start.
        known: all checkpoints of the run, those set aside included.
        above: number of the last branch that began in this folder.
        seen: newest checkpoint in the mirror.
    """
    number = max([above, *map(number_of, known)]) + 1
    mirrored = None if seen is None else Seen(number_of(seen), *identity_of(seen))
    last = Branch(number, step, secrets.token_hex(4), is_plain, mirrored)
    before = () if start is None else start.branches
    if seen is None and any(branch.seen is not None for branch in before):
        return (*before, last)
    saved = {point.branches[-1].id for point in known if point.branches}
    kept, dropped = list[Branch](), None
    for branch in (*before, last):
        if dropped is not None:
            branch = branch._replace(begin=dropped.begin, is_plain=branch.is_plain and dropped.is_plain)
        is_kept = branch.id in saved or branch.id == last.id
        kept += [branch] if is_kept else []
        dropped = None if is_kept else branch
    return tuple(kept)


def _beyond(point: Point, other: Point) -> Branches:
    """Return the branches of a checkpoint after the last one that another checkpoint has, too."""
    shared = {branch.id for branch in other.branches}
    count = max((number for number, branch in enumerate(point.branches, 1) if branch.id in shared), default=0)
    return point.branches[count:]


def _has_seen(branch: Branch, mirrored: Point) -> bool:
    """Return whether a branch began after the mirror had held this checkpoint, or a newer one."""
    if branch.seen is None:
        return False
    is_in_branch = branch.seen.id == identity_of(mirrored)[0] and branch.seen.step >= mirrored.step
    return is_in_branch or branch.seen.number > number_of(mirrored)
