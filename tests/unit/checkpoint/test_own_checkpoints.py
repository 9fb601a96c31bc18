"""The list of a run's checkpoints, in its folder and in its mirror."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.checkpoint.examples import save

from pretraining.checkpoint.forms import read_document
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.own_checkpoints import Copies, Copy, own_checkpoints
from pretraining.checkpoint.retention import set_aside
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
