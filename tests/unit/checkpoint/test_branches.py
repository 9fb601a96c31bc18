"""The rule for what belongs to a run, over random histories of two disks and a store: pure, without files."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from unit.checkpoint.true_history import TrueHistory

from pretraining.checkpoint.branches import (
    Branch,
    Branches,
    Seen,
    age_in_place,
    begin_branch,
    continues,
    identity_of,
    is_given_up,
    newest,
    own,
    parse_branches,
)


class Saved(NamedTuple):
    """A checkpoint."""

    step: int
    branches: Branches


@dataclass
class Place:
    """A disk or the store.

    Attributes:
        above: number of the last branch in run_status.json.
    """

    saved: set[Saved] = field(default_factory=set)
    aside: set[Saved] = field(default_factory=set)
    above: int = 0

    def give_up(self, head: Saved) -> None:
        others = {point for point in self.saved if is_given_up(point, head)}
        self.saved -= others
        self.aside |= others

    def replace(self, target: Saved, again: Saved) -> None:
        self.saved -= {target}
        self.saved |= {again}


class History:
    """A random history, and how often what went wrong."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._disks = {"a": Place(), "b": Place()}
        self._store = Place()
        self._truth = TrueHistory()
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        self._start("a", is_mirrored=True, is_copied=True)
        for _ in range(self._random.randrange(3, 12)):
            disk = self._random.choice("aab")
            action = self._random.random()
            if action < 0.08:  # lost
                self._disks[disk] = Place()
            elif action < 0.16:  # damaged
                place = self._random.choice([*self._disks.values(), self._store])
                place.saved -= {max(place.saved, key=age_in_place)} if place.saved else set()
            elif action < 0.2:  # removed by the user
                self._disks[disk].aside.clear()
            else:
                self._start(disk, is_mirrored=action < 0.9, is_copied=self._random.random() < 0.7)
        return self.counts

    def _start(self, disk: str, *, is_mirrored: bool, is_copied: bool) -> None:
        here, there = self._disks[disk], self._store if is_mirrored else Place()
        head = newest(here.saved, there.saved)
        if head is None and (here.saved or there.saved or self._truth.starts):
            return
        if head is not None:
            self._check(head, here, there)
        is_return = head is not None and is_mirrored and self._random.random() < 0.3
        start = self._random.choice(own(head, here.saved | there.saved)) if head is not None and is_return else head
        if is_return and here.aside and self._random.random() < 0.3:
            start = self._random.choice(sorted(here.aside, key=identity_of))
        if self._random.random() < 0.1:
            return  # refused, or killed before it trains
        lineage = self._begin(here, there, start, is_plain=not is_return)
        step = 0 if start is None else start.step
        latest = start
        here.saved |= {start} if start is not None else set()  # fetched
        here.aside -= {start}
        if start is not None and is_return:
            latest = self._save(Saved(step, lineage), start)
            here.replace(start, latest)
        if latest is not None:
            here.give_up(latest)
        if self._random.random() < 0.15:
            return  # killed between disk and store
        if is_copied and latest is not None and is_mirrored:
            if start is not None and is_return:
                there.saved -= {start}
            there.saved |= {latest}
            there.give_up(latest)
        for _ in range(self._random.randrange(4)):
            step += 10
            latest = self._save(Saved(step, lineage), latest)
            here.saved |= {latest}
            self._retain(here, latest)
            if is_copied and is_mirrored and self._random.random() < 0.8:
                there.saved |= {latest}
                there.give_up(latest)
                self._retain(there, latest)

    def _begin(self, here: Place, there: Place, start: Saved | None, *, is_plain: bool) -> Branches:
        known = here.saved | here.aside | there.saved | there.aside
        seen = max(there.saved, key=age_in_place, default=None)
        step = 0 if start is None else start.step
        lineage = begin_branch(start, step, known, above=here.above, is_plain=is_plain, seen=seen)
        here.above = lineage[-1].number
        self._truth.begin(lineage[-1].id, start, here.saved | there.saved, is_return=not is_plain)
        return lineage

    def _save(self, point: Saved, parent: Saved | None) -> Saved:
        self._truth.parent[identity_of(point)] = None if parent is None else identity_of(parent)
        return point

    def _retain(self, place: Place, head: Saved) -> None:
        """Keep the newest two, and now and then a better one."""
        older = sorted(own(head, place.saved), key=age_in_place)[:-2]
        place.saved -= {point for point in older if self._random.random() < 0.7}

    def _check(self, head: Saved, here: Place, there: Place) -> None:
        identity, line = identity_of(head), self._truth.ancestors(identity_of(head))
        strangers = [point for point in own(head, here.saved | there.saved) if identity_of(point) not in line]
        self.counts["own, and not trained from"] += bool(strangers)
        branches = {branch.id for branch in head.branches}  # of others, no place that a start saw held a checkpoint
        known = [point for point in here.saved | there.saved if point.branches[-1].id in branches]
        lost = [point for point in known if identity_of(point) in line and is_given_up(point, head)]
        self.counts["trained from, and not own"] += bool(lost)
        mirrored = max(there.saved, key=age_in_place, default=None)
        local = max(here.saved, key=age_in_place, default=None)
        self.counts.update(self._truth.gives_up(identity, mirrored, local))
        for point in here.saved | there.saved:
            between = {*self._truth.ancestors(identity_of(point))} ^ {*line}
            if point.step > head.step and not any(self._truth.starts[branch].is_return for branch, _ in between):
                self.counts["more steps that nobody gave up"] += 1
                break


def test_no_start_resumes_what_was_given_up_and_none_forgets_what_nobody_gave_up() -> None:
    total: Counter[str] = Counter()
    for seed in range(4000):
        total.update({name: bool(count) for name, count in History(seed).run().items()})
    work_lost = total.pop("more steps that nobody gave up", 0)
    assert not +total, total
    assert work_lost <= 1


def at(step: int, *branches: Branch) -> Saved:
    return Saved(step, branches)


FIRST, SECOND = Branch(1, 0, "a"), Branch(2, 40, "b")
BACK = Branch(3, 20, "c", is_plain=False, seen=Seen(2, "b", 60))


def test_a_checkpoint_continues_those_before_it_up_to_where_each_branch_began() -> None:
    later = at(60, FIRST, SECOND)
    assert continues(later, later) and continues(later, at(40, FIRST)) and continues(later, at(50, FIRST, SECOND))
    assert not continues(later, at(50, FIRST)) and not continues(at(40, FIRST), later)
    assert continues(at(20, FIRST, BACK), at(20, FIRST)) and not continues(at(30, FIRST, BACK), at(40, FIRST))
    assert is_given_up(later, at(20, FIRST, BACK)) and not is_given_up(later, at(40, FIRST))


SEEN = Branch(4, 30, "d", seen=Seen(3, "c", 30))
# of the folder, of the mirror, and which is the newest
CHOICES: dict[str, tuple[Saved | None, Saved | None, str]] = {
    "nothing": (None, None, "none"),
    "no mirror": (at(10, FIRST), None, "folder"),
    "a lost disk": (None, at(10, FIRST), "mirror"),
    "uncopied steps": (at(20, FIRST), at(10, FIRST), "folder"),
    "another machine went on": (at(20, FIRST), at(30, FIRST, Branch(2, 20, "x")), "mirror"),
    "row 58, a return on another machine": (at(60, FIRST, SECOND), at(30, FIRST, BACK), "mirror"),
    "a return before the mirror knows": (at(20, FIRST, BACK), at(60, FIRST, SECOND), "folder"),
    "a return that has not seen the mirror's": (at(20, FIRST, BACK), at(90, FIRST, Branch(2, 50, "y")), "mirror"),
    "the mirror has lost its newest since": (at(20, FIRST, BACK), at(60, FIRST), "folder"),
    "two that only resumed": (at(90, FIRST, SECOND), at(80, FIRST, Branch(2, 50, "y")), "folder"),
    "two that only resumed, the mirror's further": (at(70, FIRST, SECOND), at(80, FIRST, Branch(2, 50, "y")), "mirror"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_newest_of_both_places(name: str) -> None:
    folder, mirror, expected = CHOICES[name]
    there = {"none": None, "folder": folder, "mirror": mirror}[expected]
    assert newest(*([] if point is None else [point] for point in (folder, mirror))) is there


def test_the_newest_of_one_place_has_the_newest_branch_then_the_highest_step() -> None:
    points = [at(20, FIRST), at(90, FIRST), at(30, FIRST, BACK), at(20, FIRST, BACK)]
    assert newest(points, []) == newest([], points) == points[2]
    assert own(points[2], points) == [points[0], points[2], points[3]]


def test_a_branch_without_checkpoints_goes_and_the_next_one_takes_over_what_it_gave_up() -> None:
    start = at(30, FIRST, BACK, SEEN)
    assert begin_branch(start, 30, [start], above=4, is_plain=True, seen=None)[:3] == start.branches
    known = [at(10, FIRST), start]
    lineage = begin_branch(start, 30, known, above=7, is_plain=True, seen=at(90, FIRST))
    assert [(each.number, each.begin, each.is_plain) for each in lineage] == [
        (1, 0, True),
        (4, 20, False),
        (8, 30, True),
    ]
    assert lineage[1].seen == Seen(3, "c", 30) and lineage[-1].seen == Seen(1, "a", 90)
    assert continues(at(40, *lineage), start) and not continues(at(40, *lineage), at(25, FIRST))


@pytest.mark.parametrize(
    "values",
    [3, [3], [[1, 2, "a", True]], [["1", 2, "a", True, None]], [[True, 0, "a", True, None]], [[1, 0, "a", 1, None]]],
)
def test_another_type_is_an_error(values: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_branches(values)


def test_branches_are_read_as_they_are_written() -> None:
    assert parse_branches([[1, 0, "a", True, None], [3, 20, "c", False, [2, "b", 60]]]) == (FIRST, BACK)
