"""Branches: two manifests alone tell whether one checkpoint continues the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.checkpoint.branches import Branch, Branches, branches_from, continues, number_of, parse_branches


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and those that it was really trained from."""

    step: int
    branches: Branches
    ancestors: tuple[Saved, ...] = field(default=(), repr=False)


STARTS = st.lists(
    st.tuples(st.sampled_from(("resume", "return", "rollback")), st.integers(0, 30), st.integers(0, 3)), max_size=12
)


@given(STARTS)
def test_a_checkpoint_continues_exactly_those_that_it_was_trained_from(starts: list[tuple[str, int, int]]) -> None:
    known, newest = list[Saved](), None
    for kind, chosen, saves in [("resume", 0, 2), *starts]:
        start = known[chosen % len(known)] if kind != "resume" and known else newest
        rolls_back = kind == "rollback"
        step = 0 if start is None else start.step
        first = step + (start is not None and not rolls_back)
        branches = branches_from(start, known, first, is_return=kind != "resume")
        line = () if start is None else (*start.ancestors, *(() if rolls_back else (start,)))
        for number in range(first, first + saves + rolls_back):
            newest = Saved(number, branches, line)
            known.append(newest)
            line = (*line, newest)
    for later in known:
        for earlier in known:
            assert continues(later, earlier) == (later is earlier or any(earlier is each for each in later.ancestors))


def test_a_start_that_leaves_a_later_checkpoint_of_its_branch_behind_begins_another_one() -> None:
    branches = branches_from(None, [], 0, is_return=False)
    twenty, forty = Saved(20, branches), Saved(40, branches)
    assert branches_from(forty, [twenty, forty], 41, is_return=False) == branches
    again = branches_from(twenty, [twenty, forty], 21, is_return=False)  # a return was killed before its first save
    assert again[:1] == branches and (again[1].number, again[1].first_step) == (2, 21)
    later = Saved(60, again)
    assert branches_from(later, [twenty, forty, later], 61, is_return=False) == again  # it holds at each later start


def test_checkpoints_of_earlier_versions_have_no_branches_and_come_first() -> None:
    old = [Saved(step, ()) for step in (10, 20, 30)]
    assert continues(old[2], old[0]) and number_of(old[0]) == 0
    branches = branches_from(old[1], old, 21, is_return=True)
    new = Saved(25, branches)
    assert [continues(new, each) for each in old] == [True, True, False]
    between = Saved(35, ())  # saved by an earlier version again
    assert branches_from(between, [*old, new, between], 36, is_return=False)[:1] == branches


@pytest.mark.parametrize(
    "values", [None, 3, "ab", [3], [[1, 2]], [[1, 2, 3]], [["1", 2, "a"]], {"a": 1}, [[True, 0, "a"]]]
)
def test_a_record_that_is_none_is_no_branch(values: Any) -> None:
    assert parse_branches(values) == ()
    assert parse_branches([[2, 21, "ab"]]) == (Branch(2, 21, "ab"),)
