"""The list of a run's checkpoints, in its folder and in its mirror."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import SHAPES, flip_byte, manifest_of, tensors_of, write_sharded
from unit.checkpoint.examples import save, tensors

from pretraining.checkpoint.branches import Branch, Branches, branches_from, continues, number_of, parse_branches
from pretraining.checkpoint.forms import read_document
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.own_checkpoints import Copies, own_checkpoints
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.restore import load_model
from pretraining.checkpoint.retention import set_aside
from pretraining.checkpoint.run_folder import CHECKPOINTS, Copy
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import with_checksum

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


@dataclass(frozen=True)
class Trained:
    """A checkpoint, and those that it was really trained from."""

    step: int
    branches: Branches
    ancestors: tuple[Trained, ...] = field(default=(), repr=False)


STARTS = st.lists(
    st.tuples(st.sampled_from(("resume", "return", "rollback")), st.integers(0, 30), st.integers(0, 3)), max_size=12
)


@given(STARTS)
def test_a_checkpoint_continues_exactly_those_that_it_was_trained_from(starts: list[tuple[str, int, int]]) -> None:
    known, newest = list[Trained](), None
    for kind, chosen, saves in [("resume", 0, 2), *starts]:
        start = known[chosen % len(known)] if kind != "resume" and known else newest
        rolls_back = kind == "rollback"
        step = 0 if start is None else start.step
        first = step + (start is not None and not rolls_back)
        branches = branches_from(start, known, first, is_return=kind != "resume")
        line = () if start is None else (*start.ancestors, *(() if rolls_back else (start,)))
        for number in range(first, first + saves + rolls_back):
            newest = Trained(number, branches, line)
            known.append(newest)
            line = (*line, newest)
    for later in known:
        for earlier in known:
            assert continues(later, earlier) == (later is earlier or any(earlier is each for each in later.ancestors))


def test_a_start_that_leaves_a_later_checkpoint_of_its_branch_behind_begins_another_one() -> None:
    branches = branches_from(None, [], 0, is_return=False)
    twenty, forty = Trained(20, branches), Trained(40, branches)
    assert branches_from(forty, [twenty, forty], 41, is_return=False) == branches
    again = branches_from(twenty, [twenty, forty], 21, is_return=False)  # a return was killed before its first save
    assert again[:1] == branches and (again[1].number, again[1].first_step) == (2, 21)
    later = Trained(60, again)
    assert branches_from(later, [twenty, forty, later], 61, is_return=False) == again  # it holds at each later start


def test_checkpoints_of_earlier_versions_have_no_branches_and_come_first() -> None:
    old = [Trained(step, ()) for step in (10, 20, 30)]
    assert continues(old[2], old[0]) and number_of(old[0]) == 0
    branches = branches_from(old[1], old, 21, is_return=True)
    new = Trained(25, branches)
    assert [continues(new, each) for each in old] == [True, True, False]
    between = Trained(35, ())  # saved by an earlier version again
    assert branches_from(between, [*old, new, between], 36, is_return=False)[:1] == branches


@pytest.mark.parametrize(
    "values", [None, 3, "ab", [3], [[1, 2]], [[1, 2, 3]], [["1", 2, "a"]], {"a": 1}, [[True, 0, "a"]]]
)
def test_a_record_that_is_none_is_no_branch(values: Any) -> None:
    assert parse_branches(values) == ()
    assert parse_branches([[2, 21, "ab"]]) == (Branch(2, 21, "ab"),)


def own(run: Path) -> CheckpointConfig:
    return CheckpointConfig(ckpt_save_path=str(run))


def load_newest(config: CheckpointConfig) -> CheckpointRef | None:
    """Return the checkpoint that a start resumes: the newest that can be loaded."""
    damaged: dict[str, str] = {}
    while (found := find_start(config, damaged)) is not None:
        try:
            load_tensors(found.path, found.manifest.files, tensors(0.0))
        except DamagedError as error:
            damaged[found.source] = str(error)
        else:
            return found
    return None


def shard_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def forge(folder: Path, name: str, size: int) -> None:
    """Make the manifest name another file, with a valid checksum of the manifest."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["checksum"]
    document["files"][name] = {"bytes": size, "crc32": "00000000"}
    (folder / MANIFEST).write_text(json.dumps(with_checksum(document)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing shard": lambda folder: shard_of(folder).unlink(),
    "truncated shard": lambda folder: os.truncate(shard_of(folder), 9),
    "flipped bit": lambda folder: flip_byte(shard_of(folder), bits=1),
    "stranger": lambda folder: (folder / "extra.safetensors").touch(),
    "lost manifest": lambda folder: (folder / MANIFEST).unlink(),
    "damaged manifest": lambda folder: (folder / MANIFEST).write_text("{"),
    "deep manifest": lambda folder: (folder / MANIFEST).write_text("[" * 10**5),
    "other manifest": lambda folder: (folder / MANIFEST).write_text("{}"),
    "escaping manifest": lambda folder: forge(folder, "../../x.safetensors", 1),
    "pickle in the manifest": lambda folder: forge(folder, "x.pt", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 5), save(tmp_path, 6)
    DAMAGES[damage](bad)
    found = load_newest(own(tmp_path))
    assert found is not None and found.path == good and found.is_own
    (line,) = found.damaged
    assert str(bad) in line
    exact = CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(bad))
    with pytest.raises(CheckpointError) as named:
        load_newest(exact)
    assert str(bad) in str(named.value) and named.value.settings == ("ckpt_load_path",)
    DAMAGES[damage](good)
    with pytest.raises(CheckpointError) as none:
        load_newest(own(tmp_path))
    assert str(good) in str(none.value) and str(bad) in str(none.value)


def test_a_load_path_may_be_a_run_its_folder_of_checkpoints_or_one_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "other"
    first, second = save(run, 1), save(run, 2)
    best = run / CHECKPOINTS / "best"
    best.symlink_to(first.name)
    for source, expected in [(run, second), (run / CHECKPOINTS, second), (first, first), (best, best)]:
        found = find_start(CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(source)))
        assert found is not None and found.path == expected


def test_a_tied_model_is_loaded_with_one_tensor_for_both_ends(tmp_path: Path) -> None:
    written = write_sharded(tmp_path / "c", tensors_of(SHAPES["tied"]), manifest_of(SHAPES["tied"]))
    _, model = load_model(str(tmp_path / "c"), torch.device("cpu"), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(value, written[name]) for name, value in model.named_parameters())
