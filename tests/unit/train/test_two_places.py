"""Whole runs whose checkpoints are in a folder and in a mirror, of which one was lost, damaged or left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from training_runs import checkpoints_of, losses_of
from unit.train.whole_runs import checkpoint, damage, equal, refusal, start, started_at

from pretraining.cli import main
from pretraining.errors import CheckpointError
from pretraining.object_store import Store
from pretraining.tools.command_settings import PushConfig
from pretraining.tools.push import push


def mirrored(folder: Path) -> str:
    return f"ckpt_mirror_path=file://{folder / 'store'}"


EVALUATED = ("held_out_fraction=0.1", "eval_interval=2", "eval_batches=1", "num_steps=8", "checkpoint_interval=2")


def train(folder: Path, *flags: str, run: str = "run") -> None:
    start(folder / run, mirrored(folder), *EVALUATED, "learning_rate=3", *flags)


def copies_in(folder: Path, store: str = "store") -> set[str]:
    return {path.parent.name for path in (folder / store / "checkpoints").glob("*/manifest.json")}


def step_names(*steps: int) -> set[str]:
    return {f"step_{step}_ckp" for step in steps}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with its mirror, the best of them step 2; tests must not change it."""
    folder = tmp_path_factory.mktemp("mirrored")
    for rate in (1e-2, 3, 3, 3):  # an earlier copy may be skipped for a newer one
        train(folder, "run_steps=2", f"learning_rate={rate}")
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copied", symlinks=True)


def test_row_58_an_old_disk_does_not_undo_a_return_on_another_machine(copied: Path) -> None:
    shutil.copytree(copied / "run", copied / "old", symlinks=True)
    train(copied, "resume_from_checkpoint=4", "learning_rate=2e-3", "run_steps=2")
    assert copies_in(copied) == step_names(2, 4, 6)
    before = {path: path.read_bytes() for path in (copied / "store").rglob("*.json")}
    with pytest.raises(CheckpointError, match="step_8_ckp"):
        push(PushConfig(paths=(str(copied / "old"), f"file://{copied}/store")))
    assert before == {path: path.read_bytes() for path in (copied / "store").rglob("*.json")}
    train(copied, "learning_rate=2e-3", run="old")
    assert started_at(copied / "old") == 6
    assert equal(checkpoint(copied / "old", 6), checkpoint(copied / "run", 6))
    assert len(list((copied / "old" / "checkpoints").glob("set_aside_*/step_8_ckp"))) == 1
    assert len(losses_of(copied / "old")) == 8 and losses_of(copied / "old")[:6] == losses_of(copied / "run")
    assert copies_in(copied) == step_names(2, 4, 6, 8)
    assert equal(checkpoint(copied / "store", 8), checkpoint(copied / "old", 8))


def test_row_57_best_is_fetched_after_the_loss_of_a_disk(copied: Path, trained: Path) -> None:
    shutil.rmtree(copied / "run")
    train(copied, "num_steps=9")
    assert (copied / "run" / "checkpoints" / "best").readlink() == Path("step_2_ckp")
    assert equal(checkpoint(copied / "run", 2), checkpoint(trained / "run", 2))


def test_an_older_checkpoint_that_only_the_mirror_holds_is_returned_to(copied: Path) -> None:
    shutil.rmtree(copied / "run")
    train(copied, "resume_from_checkpoint=step_4_ckp", "run_steps=1")
    assert started_at(copied / "run") == 4 and checkpoints_of(copied / "run") == step_names(2, 4, 5)  # 2 is the best
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


def test_a_kill_before_the_mirror_knows_of_a_return_does_not_undo_the_return(copied: Path, trained: Path) -> None:
    train(copied, "resume_from_checkpoint=4", "run_steps=1")
    shutil.rmtree(copied / "store")
    shutil.copytree(trained / "store", copied / "store")
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
    start(new, f"ckpt_mirror_path=file://{copied / 'another'}", "seed=5", "num_steps=1")
    assert started_at(new) == 0


def test_push_copies_the_good_checkpoints_names_the_damaged_ones_and_keeps_their_copies(
    copied: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(checkpoint(copied / "store", 6))
    damage(checkpoint(copied / "run", 2))
    (checkpoint(copied / "run", 4) / "manifest.json").write_text("{")
    shard = max(checkpoint(copied / "run", 8).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    for store, copies, number in (("store", step_names(2, 4, 6, 8), 3), ("other", step_names(6), 1)):
        with pytest.raises(SystemExit) as ending:
            main(["push", str(copied / "run"), f"file://{copied}/{store}"])
        said = capsys.readouterr()
        assert copies_in(copied, store) == copies
        assert ending.value.code == 1 and f"1 checkpoint copied, {number} are in" in said.out
        assert "step_4_ckp" in said.err and all((each in said.err) == (store == "other") for each in step_names(2, 8))
    assert equal(checkpoint(copied / "store", 8), checkpoint(trained / "store", 8))
