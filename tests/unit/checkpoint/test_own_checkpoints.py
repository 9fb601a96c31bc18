"""The list of a run's checkpoints, in its folder and in its mirror."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.branches import Branch, Branches
from pretraining.checkpoint.forms import read_document
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.own_checkpoints import Copies, own_checkpoints
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import Copy
from pretraining.checkpoint.start_point import find_start
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("single_process")


def copies_of(paths: Iterable[Path], set_aside: Iterable[Path] = (), changed: Iterable[Path] = ()) -> Copies:
    """Return copies of checkpoints; those that are `changed` were saved again by another process."""
    again = set(changed)

    def manifest(path: Path) -> Manifest:
        return replace(read_document(path), seconds=123.0) if path in again else read_document(path)

    complete = {path.name: Copy("file:///store", f"checkpoints/{path.name}", manifest(path)) for path in paths}
    return Copies(complete, {path.name: read_document(path) for path in set_aside})


def names(paths: Iterable[Path]) -> list[str]:
    return [path.name.removeprefix("step_").removesuffix("_ckp") for path in paths]


def test_a_run_has_the_checkpoints_of_both_places(tmp_path: Path) -> None:
    elsewhere = [save(tmp_path / "b", step) for step in (4, 8)]
    save(tmp_path / "a", 2), save(tmp_path / "a", 4)
    found = own_checkpoints(tmp_path / "a", copies_of(elsewhere))
    assert [(each.step, each.is_here, each.copy is not None) for each in found.current] == [
        (2, True, False),
        (4, True, True),
        (8, False, True),
    ]
    assert found.given_up == ()


def test_what_another_machine_went_back_from_does_not_count(tmp_path: Path) -> None:
    _, four, six, seven, eight = (save(tmp_path, step) for step in (2, 4, 6, 7, 8))
    # The mirror has never held step 7, and step 6 was saved again there.
    found = own_checkpoints(tmp_path, copies_of([four, six], set_aside=[six, eight], changed=[six]))
    assert names(each.path for each in found.current) == ["2", "4", "6"]
    assert [each.is_here for each in found.current] == [True, True, False]
    assert list(found.given_up) == [six, seven, eight]


def test_what_this_machine_went_back_from_is_not_fetched_before_the_mirror_knows(tmp_path: Path) -> None:
    paths = two, _, six, eight = [save(tmp_path, step) for step in (2, 4, 6, 8)]
    copies = copies_of(paths)
    set_aside(tmp_path, [eight])
    found = own_checkpoints(tmp_path, copies_of([two, six], changed=[six]))
    assert names(each.path for each in found.current) == ["2", "4", "6"]  # a copy that is no longer there is no reason
    found = own_checkpoints(tmp_path, copies)
    assert names(each.path for each in found.current) == ["2", "4", "6"] and found.given_up == ()


def test_a_folder_in_which_everything_is_given_up_is_no_new_run(tmp_path: Path) -> None:
    eight = save(tmp_path, 8)
    with pytest.raises(CheckpointError, match="set aside") as caught:
        own_checkpoints(tmp_path, copies_of([], set_aside=[eight]))
    assert "set_aside.json" in str(caught.value) and caught.value.path == tmp_path


def test_a_damaged_checkpoint_is_replaced_by_its_copy(tmp_path: Path) -> None:
    four, six = save(tmp_path, 4), save(tmp_path, 6)
    config, copies = CheckpointConfig(str(tmp_path)), copies_of([six])
    (six / "manifest.json").write_text("{")
    found = find_start(config, copies=copies)
    assert (
        found is not None and (found.path, found.copy) == (six, copies.complete[six.name]) and len(found.damaged) == 1
    )
    again = find_start(config, {found.source: "a fault of the copy"}, copies=copies)
    assert again is not None and (again.path, again.copy, len(again.damaged)) == (four, None, 2)


def test_the_best_checkpoint_is_fetched_with_the_start_point(tmp_path: Path) -> None:
    elsewhere = [save(tmp_path / "b", step, evaluation_loss=loss) for step, loss in ((2, 3.0), (4, 2.5), (6, 2.9))]
    save(tmp_path / "a", 2, evaluation_loss=3.0)
    config, copies = CheckpointConfig(str(tmp_path / "a")), copies_of(elsewhere)
    for before, step, best in ((None, 6, "step_4_ckp"), (6, 4, None), (4, 2, None)):
        found = find_start(config, before_step=before, copies=copies)
        assert found is not None and found.step == step
        assert (None if found.best_copy is None else found.best_copy.name) == best


Saved = Sequence[tuple[int, Branches]]
FIRST, RETURN, ROLLBACK, OTHER = Branch(1, 0, "a"), Branch(2, 5, "b"), Branch(3, 6, "c"), Branch(2, 5, "d")


def make(run: Path, *saved: tuple[int, Branches]) -> list[Path]:
    """Save steps with their branches; a loss makes their manifests differ between machines."""
    return [save(run, step, evaluation_loss=float(len(str(run))), branches=branches) for step, branches in saved]


OLD: Saved = [(step, (FIRST,)) for step in (2, 4, 6, 8)]
NEW: Saved = [(2, (FIRST,)), (5, (FIRST, RETURN)), (7, (FIRST, RETURN))]
AGAIN: Saved = [(2, (FIRST,)), (6, (FIRST, RETURN, ROLLBACK))]  # which saved step 6 again
MOVED: Saved = [(4, (FIRST,)), (5, (FIRST, RETURN)), (8, (FIRST,))]
EARLIER: Saved = [(9, ())]  # saved by an earlier version, which knows no branches
BOTH: Saved = [(4, (FIRST,)), (6, (FIRST, RETURN))]
# on the disk, in the store; then the steps that count, those given up on the disk and those given up in the store
CHOICES: dict[str, tuple[Saved, Saved, list[str], list[str], list[str]]] = {
    "row 63, an old disk": (OLD, NEW, ["2", "4", "5", "7"], ["6", "8"], []),
    "row 63, an old store": (NEW, OLD, ["2", "4", "5", "7"], [], ["6", "8"]),
    "a rollback": (NEW, AGAIN, ["2", "5", "6"], ["7"], []),
    "two returns that did not see each other": (
        [(4, (FIRST,)), (9, (FIRST, OTHER))],
        [(4, (FIRST,)), (7, (FIRST, RETURN))],
        ["4", "7"],
        ["9"],
        [],
    ),
    "row 63, moved back by the user on both sides": (MOVED, MOVED, ["4", "5", "8"], [], []),
    "moved back in the store": ([(4, (FIRST,)), (7, (FIRST, RETURN))], MOVED, ["4", "5", "8"], ["7"], []),
    "an earlier version's on the disk": (EARLIER, BOTH, ["4", "6", "9"], [], []),
    "an earlier version's in the store": (BOTH, EARLIER, ["4", "6", "9"], [], []),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_side_with_the_newest_return_decides(name: str, tmp_path: Path) -> None:
    disk, store, *expected = CHOICES[name]
    make(tmp_path / "a", *disk)
    found = own_checkpoints(tmp_path / "a", copies_of(make(tmp_path / "bb", *store)))
    assert [names(each.path for each in found.current), names(found.given_up)] == expected[:2]
    assert names(map(Path, found.given_up_copies)) == expected[2]
