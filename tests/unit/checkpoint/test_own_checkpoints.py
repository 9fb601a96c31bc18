"""The list of a run's checkpoints, in its folder and in its mirror."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from unit.checkpoint.checkpoint_files import SHAPES, flip_byte, tensors_of, write_sharded
from unit.checkpoint.checkpoint_files import manifest_of as manifest_of_model
from unit.checkpoint.examples import manifest_of, save, tensors

from pretraining.checkpoint.branches import Branch
from pretraining.checkpoint.manifest import MANIFEST, RUN_STATE
from pretraining.checkpoint.own_checkpoints import Copies, list_run, set_aside_others
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.restore import load_model
from pretraining.checkpoint.run_folder import CHECKPOINTS, STATUS_FILE, Checkpoint, Copy, read_document
from pretraining.checkpoint.start_point import CheckpointRef, find_start
from pretraining.checkpoint.writer import plan_save, save_checkpoint
from pretraining.config.training import CheckpointConfig
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import with_checksum, write_atomic

pytestmark = pytest.mark.usefixtures("single_process")


def copies_of(paths: Iterable[Path], set_aside: Iterable[Path] = ()) -> Copies:
    """Return copies of checkpoints."""

    def copy(path: Path) -> Copy:
        return Copy("file:///store", f"checkpoints/{path.name}", read_document(path))

    return Copies(
        {path.name: copy(path) for path in paths}, {f"set_aside_1/{path.name}": copy(path) for path in set_aside}
    )


def steps(checkpoints: Iterable[Checkpoint]) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints]


FIRST = Branch(1, 0, "first")
BACK, AGAIN = Branch(2, 4, "b", is_plain=False), Branch(3, 6, "c", is_plain=False)


def make(run: Path, *saved: tuple[int, *tuple[Branch, ...]]) -> list[Path]:
    """Save steps with their branches after the first; a loss makes their manifests differ between machines."""
    loss = float(len(str(run)))
    return [save(run, step, evaluation_loss=loss, branches=(FIRST, *branches)) for step, *branches in saved]


def test_a_run_has_the_checkpoints_of_both_places(tmp_path: Path) -> None:
    elsewhere = [save(tmp_path / "b", step) for step in (4, 8)]
    save(tmp_path / "a", 2), save(tmp_path / "a", 4)
    listed = list_run(tmp_path / "a", copies_of(elsewhere))
    assert [(each.step, each.is_here, each.copy is not None) for each in listed.saved] == [
        (2, True, False),
        (4, True, True),
        (8, False, True),
    ]
    assert listed.mirrored == listed.saved[-1] and listed.run_id == "a run"


def test_checkpoints_of_one_name_and_two_branches_are_two(tmp_path: Path) -> None:
    here = make(tmp_path / "a", (4,), (6,))
    there = make(tmp_path / "b", (4, BACK), (6, BACK))
    found = find_start(own(tmp_path / "a"), copies=copies_of(there))
    assert found is not None and (found.path, str(found.copy)) == (here[1], "file:///store/checkpoints/step_6_ckp")
    listed = list_run(tmp_path / "a", copies_of(there))
    assert [(each.step, each.is_here) for each in listed.saved] == [(4, True), (6, True), (4, False), (6, False)]
    assert [path.name for path in set_aside_others(tmp_path / "a", there[1])] == ["step_6_ckp"]
    assert steps(list_run(tmp_path / "a", copies_of([], there)).set_aside) == [6, 4, 6]


def test_checkpoints_of_another_run_neither_count_nor_move(tmp_path: Path) -> None:
    mine, other = save(tmp_path / "a", 4), tmp_path / "a" / CHECKPOINTS / "step_9_ckp"
    manifest = manifest_of(9)
    record = {"id": "another", "branches": (Branch(7, 0, "x"),)}
    save_checkpoint(other, plan_save(tensors(9.0)), replace(manifest, state={RUN_STATE: record}))
    write_atomic(tmp_path / "a" / STATUS_FILE, json.dumps(with_checksum({"run_id": "a run"})))
    found = find_start(own(tmp_path / "a"))
    assert found is not None and found.path == mine
    assert set_aside_others(tmp_path / "a", mine) == [] and other.exists()
    (tmp_path / "a" / STATUS_FILE).unlink()  # then the newest one says which run it is
    found = find_start(own(tmp_path / "a"))
    assert found is not None and found.path == other


def test_the_best_checkpoint_is_fetched_with_the_start_point(tmp_path: Path) -> None:
    elsewhere = [save(tmp_path / "b", step, evaluation_loss=loss) for step, loss in ((2, 3.0), (4, 2.5), (6, 2.9))]
    save(tmp_path / "a", 2, evaluation_loss=3.0)
    config, copies = CheckpointConfig(str(tmp_path / "a")), copies_of(elsewhere)
    for before, step, best in ((None, 6, "step_4_ckp"), (6, 4, None), (4, 2, None)):
        found = find_start(config, before_step=before, copies=copies)
        assert found is not None and found.step == step
        assert (None if found.best_copy is None else found.best_copy.name) == best


def test_a_rollback_goes_back_to_a_checkpoint_that_the_newest_one_continues(tmp_path: Path) -> None:
    make(tmp_path / "a", (2,), (4,), (6,), (8, BACK))  # step 6 was given up, and somebody has moved it back
    make(tmp_path / "b", (2,), (4, BACK), (6, BACK, AGAIN), (8, BACK, AGAIN))
    for run, before, step in (("a", None, 8), ("a", 8, 4), ("a", 4, 2), ("b", 8, 6)):
        found = find_start(own(tmp_path / run), before_step=before)
        assert found is not None and found.step == step
    assert find_start(own(tmp_path / "a"), before_step=2) is None


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


# Others are in tests/faults/test_damage.py.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda folder: flip_byte(shard_of(folder), bits=1),
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


def test_a_file_that_no_manifest_names_is_no_damage(tmp_path: Path) -> None:
    newest = save(tmp_path, 6)
    for name in (f"._{shard_of(newest).name}", "._manifest.json", "extra.safetensors"):
        (newest / name).write_bytes(b"\0")
    found = load_newest(own(tmp_path))
    assert found is not None and found.path == newest and not found.damaged


def test_a_load_path_may_be_a_run_its_folder_of_checkpoints_or_one_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "other"
    first, second = save(run, 1), save(run, 2)
    best = run / CHECKPOINTS / "best"
    best.symlink_to(first.name)
    for source, expected in [(run, second), (run / CHECKPOINTS, second), (first, first), (best, best)]:
        found = find_start(CheckpointConfig(ckpt_save_path=str(tmp_path / "own"), ckpt_load_path=str(source)))
        assert found is not None and found.path == expected


def test_a_tied_model_is_loaded_with_one_tensor_for_both_ends(tmp_path: Path) -> None:
    written = write_sharded(tmp_path / "c", tensors_of(SHAPES["tied"]), manifest_of_model(SHAPES["tied"]))
    _, model = load_model(str(tmp_path / "c"), torch.device("cpu"), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(value, written[name]) for name, value in model.named_parameters())
