"""Whole runs whose checkpoints are in a folder and in a mirror, of which one was lost, damaged or left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import checkpoints_of, losses_of, write_dataset
from unit.train.whole_runs import checkpoint, damage, diverging_after, equal, manifest_of, refusal, start, started_at

from pretraining.checkpoint.mirror import Mirror
from pretraining.cli import main
from pretraining.errors import CheckpointError
from pretraining.files import with_checksum
from pretraining.object_store import Store, StoreError
from pretraining.tools.commands import PushConfig
from pretraining.tools.push import push


def mirrored(folder: Path) -> str:
    return f"ckpt_mirror_path=file://{folder / 'store'}"


def train(folder: Path, *flags: str, run: str = "run", steps: int = 8) -> None:
    start(folder / run, mirrored(folder), f"num_steps={steps}", "checkpoint_interval=2", *flags)


def train_in_parts(folder: Path, steps: int = 8) -> None:
    """Train, and wait for every copy: an earlier copy may be skipped for a newer one."""
    for _ in range(0, steps, 2):
        train(folder, "run_steps=2", steps=steps)


def copies_in(folder: Path) -> set[str]:
    return {path.parent.name for path in (folder / "store" / "checkpoints").glob("*/manifest.json")}


def step_names(*steps: int) -> set[str]:
    return {f"step_{step}_ckp" for step in steps}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with its mirror; tests must not change it."""
    folder = tmp_path_factory.mktemp("mirrored")
    train_in_parts(folder)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copied", symlinks=True)


def test_row_55_a_rollback_after_the_loss_of_a_disk_goes_back_to_the_mirrors_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_parts(tmp_path, steps=4)
    diverging_after(5, monkeypatch, runs=2)
    guards = ("max_skipped_steps=2", "max_rollbacks=1")
    train(tmp_path, *guards, "run_steps=2")  # step 6 is saved after a skipped update
    shutil.rmtree(tmp_path / "run")
    train(tmp_path, *guards, steps=10)  # the update of step 7 is skipped, too
    assert checkpoints_of(tmp_path / "run") >= step_names(4, 6, 8, 10)
    for step in (4, 6, 8):
        assert manifest_of(tmp_path / "run", step)["data"]["skipped"] == [[10, 14]]
    assert copies_in(tmp_path) >= step_names(2, 4, 10)


def test_row_55_a_rollback_to_a_checkpoint_that_is_damaged_on_disk_takes_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_parts(tmp_path, steps=4)
    before = shutil.copytree(checkpoint(tmp_path / "run", 4), tmp_path / "four")
    diverging_after(4, monkeypatch, then=lambda: damage(checkpoint(tmp_path / "run", 4)))
    train(tmp_path, "max_skipped_steps=2", "max_rollbacks=1", "run_steps=2")
    assert [manifest_of(tmp_path / "run", step)["data"]["skipped"] for step in (2, 4, 6)] == [[], *[[[8, 12]]] * 2]
    assert equal(checkpoint(tmp_path / "store", 4), before)


def test_a_rollback_waits_for_a_store_that_fails_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_parts(tmp_path, steps=4)
    sizes, faults = Store.sizes, list[StoreError]()

    def fail_once(self: Store) -> dict[str, int]:
        if faults:
            raise faults.pop()
        return sizes(self)

    monkeypatch.setattr(Store, "sizes", fail_once)
    diverging_after(4, monkeypatch, then=lambda: faults.append(StoreError("throttled")))
    train(tmp_path, "max_skipped_steps=2", "max_rollbacks=1", "run_steps=2")
    assert manifest_of(tmp_path / "run", 6)["data"]["skipped"] == [[8, 12]]


def test_a_copy_that_another_machine_makes_during_a_start_is_the_start_point(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copied / "run")
    late = {step: checkpoint(copied / "store", step) for step in (4, 6, 8)}
    for step, path in late.items():
        path.rename(copied / str(step))
    take_over = Mirror._take_over

    def after_the_others(self: Mirror, *arguments: Any) -> None:
        for step, path in late.items():
            if not path.exists():
                (copied / str(step)).rename(path)
        take_over(self, *arguments)

    monkeypatch.setattr(Mirror, "_take_over", after_the_others)
    train(copied, steps=10)
    assert started_at(copied / "run") == 8 and copies_in(copied) == step_names(2, 4, 6, 8, 10)


def test_row_57_best_is_fetched_after_the_loss_of_a_disk(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data" / "web")
    data = (f"data_path={tmp_path / 'data'}", "sep_token=0", "logical_shards=8", "held_out_fraction=0.1")
    evaluated = (*data, "eval_interval=2", "eval_batches=2", "batch_size=4")
    train(tmp_path, *evaluated, "learning_rate=1e-2", "run_steps=2", steps=6)
    train(tmp_path, *evaluated, "learning_rate=3", "run_steps=2", steps=6)
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == Path("step_2_ckp")
    shutil.rmtree(tmp_path / "run")
    train(tmp_path, *evaluated, "learning_rate=3", steps=6)
    assert (tmp_path / "run" / "checkpoints" / "best").readlink() == Path("step_2_ckp")
    assert equal(checkpoint(tmp_path / "run", 2), checkpoint(tmp_path / "store", 2))


@pytest.mark.parametrize("is_in_the_mirror", [True, False])
def test_row_58_an_old_disk_does_not_undo_a_return_on_another_machine(is_in_the_mirror: bool, copied: Path) -> None:
    shutil.copytree(copied / "run", copied / "old", symlinks=True)
    if not is_in_the_mirror:  # the mirror has missed step 7
        start(copied / "old", "resume_from_checkpoint=6", "run_steps=1", "num_steps=8", "ckpt_mirror_path=none")
        shutil.rmtree(copied / "old" / "checkpoints" / "step_6_ckp")
        [eight] = (copied / "old" / "checkpoints").glob("set_aside_*/step_8_ckp")
        eight.rename(checkpoint(copied / "old", 8))
    train(copied, "resume_from_checkpoint=4", "learning_rate=2e-3", "run_steps=2")
    assert copies_in(copied) == step_names(2, 4, 6)
    train(copied, "learning_rate=2e-3", run="old")
    assert started_at(copied / "old") == 6
    assert equal(checkpoint(copied / "old", 6), checkpoint(copied / "run", 6))
    assert len(list((copied / "old" / "checkpoints").glob("set_aside_*/step_8_ckp"))) == 1
    assert len(losses_of(copied / "old")) == 8 and losses_of(copied / "old")[:6] == losses_of(copied / "run")
    assert copies_in(copied) == step_names(2, 4, 6, 8) and equal(
        checkpoint(copied / "store", 8), checkpoint(copied / "old", 8)
    )


def test_push_does_not_copy_what_the_run_went_back_from_on_another_machine(copied: Path) -> None:
    shutil.copytree(copied / "run", copied / "old", symlinks=True)
    train(copied, "resume_from_checkpoint=4", "learning_rate=2e-3", "run_steps=2")
    before = {path: path.read_bytes() for path in (copied / "store").rglob("*.json")}
    with pytest.raises(CheckpointError, match="step_8_ckp"):
        push(PushConfig(paths=(str(copied / "old"), f"file://{copied}/store")))
    assert before == {path: path.read_bytes() for path in (copied / "store").rglob("*.json")}


def test_an_older_checkpoint_that_only_the_mirror_holds_is_returned_to(copied: Path) -> None:
    shutil.rmtree(copied / "run")
    train(copied, "resume_from_checkpoint=step_4_ckp", "run_steps=1")
    assert started_at(copied / "run") == 4 and checkpoints_of(copied / "run") == step_names(4, 5)
    assert copies_in(copied) == step_names(2, 4, 5)


def test_a_return_to_a_checkpoint_that_the_mirror_lacks_copies_it_first(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copied / "store" / "checkpoints" / "step_4_ckp")
    held: list[set[str]] = []
    remove = Store.remove

    def watch(self: Store, name: str) -> None:
        remove(self, name)
        held.append(copies_in(copied))

    monkeypatch.setattr(Store, "remove", watch)
    train(copied, "resume_from_checkpoint=4", "run_steps=2")
    assert [each for each in held if "step_4_ckp" not in each and each != step_names(2, 6, 8)] == []
    assert copies_in(copied) == step_names(2, 4, 6)


def test_a_kill_before_the_mirror_knows_of_a_return_does_not_undo_the_return(copied: Path) -> None:
    for name in ("store", "run"):
        shutil.copytree(copied / name, copied / f"{name}_before", symlinks=True)
    train(copied, "resume_from_checkpoint=4", "run_steps=1")
    shutil.rmtree(copied / "store")
    (copied / "store_before").rename(copied / "store")
    shutil.rmtree(checkpoint(copied / "run", 5))  # the state of both places after a kill in the first step
    train(copied, "run_steps=1")
    assert started_at(copied / "run") == 4 and copies_in(copied) == step_names(2, 4, 5)


def test_a_start_that_is_refused_leaves_nothing_of_another_runs_mirror(copied: Path) -> None:
    new = copied / "new"
    refusal(new, mirrored(copied), "hidden_size=64", "seq_length=16")  # another model
    refusal(new, mirrored(copied), "seed=5")  # other data
    refusal(new, mirrored(copied), "optimizer=muon")
    left = {path.name for path in new.rglob("*") if path.is_file()}
    assert left <= {"run_status.json", "events.jsonl", "environment.json"}
    start(new, f"ckpt_mirror_path=file://{copied / 'another'}", "seed=5")
    assert len(losses_of(new)) == 4 and started_at(new) == 0


def test_a_checkpoint_of_another_run_is_refused_unless_the_run_began_there(copied: Path, tmp_path: Path) -> None:
    start(tmp_path / "mine", "num_steps=2")
    error = refusal(tmp_path / "mine", f"resume_from_checkpoint={checkpoint(copied / 'run', 4)}")
    assert isinstance(error, CheckpointError) and "did not start from it" in str(error) and "step 2" in str(error)
    request = f"resume_from_checkpoint={checkpoint(copied / 'run', 4)}"
    start(tmp_path / "next", request, "num_steps=6")
    start(tmp_path / "next", "num_steps=7")  # a start without the flag, whose checkpoint does not name it
    start(tmp_path / "next", request, "num_steps=8")
    assert started_at(tmp_path / "next") == 7


def test_push_copies_the_good_checkpoints_and_names_the_damaged_ones(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(checkpoint(copied / "run", 2))
    (checkpoint(copied / "run", 4) / "manifest.json").write_text("{")
    with pytest.raises(SystemExit) as ending:
        main(["push", str(copied / "run"), f"file://{copied}/other"])
    said = capsys.readouterr()
    assert ending.value.code == 1 and "2 checkpoints copied, 2 are in" in said.out
    assert "step_2_ckp" in said.err and "step_4_ckp" in said.err
    assert {path.parent.name for path in (copied / "other").glob("checkpoints/*/manifest.json")} == step_names(6, 8)


def test_push_keeps_the_copy_of_a_checkpoint_that_is_cut_on_disk(copied: Path) -> None:
    shutil.rmtree(checkpoint(copied / "store", 6))
    before = shutil.copytree(checkpoint(copied / "store", 8), copied / "eight")
    for step in (4, 8):
        shard = max(checkpoint(copied / "run", step).glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-8])
    push(PushConfig(paths=(str(copied / "run"), f"file://{copied}/store")))
    assert copies_in(copied) == step_names(2, 4, 6, 8) and equal(checkpoint(copied / "store", 8), before)
    with pytest.raises(CheckpointError, match="2 checkpoints not copied"):  # and does not try to copy them for ever
        push(PushConfig(paths=(str(copied / "run"), f"file://{copied}/other")))


def test_a_start_skips_a_checkpoint_whose_position_in_the_data_cannot_be_read(tmp_path: Path) -> None:
    start(tmp_path, "num_steps=4", "checkpoint_interval=2")
    document = manifest_of(tmp_path, 4)
    document["data"]["next_sample"] = "x"
    del document["checksum"]
    (checkpoint(tmp_path, 4) / "manifest.json").write_text(json.dumps(with_checksum(document)))
    start(tmp_path, "num_steps=6", "checkpoint_interval=2")
    assert started_at(tmp_path) == 2 and len(losses_of(tmp_path)) == 6
