"""Damaged and hostile checkpoints at a resume."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_runs import FaultyRun, train, train_each
from training_runs import events_of

FLAGS = ["num_steps=9", "checkpoint_interval=2"]


def shard(checkpoint: Path, rank: int) -> Path:
    return next(checkpoint.glob(f"shard-0000{rank + 1}-*"))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


def as_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(path.parents[3] / "executed")))


# What happens to checkpoint 6; the last one is no damage: nobody reads the file.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated shard": lambda folder: truncate(shard(folder, 1)),
    "bit-flipped shard": lambda folder: flip_a_bit(shard(folder, 1)),
    "missing shard": lambda folder: shard(folder, 0).unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "bit-flipped manifest": lambda folder: flip_a_bit(folder / "manifest.json"),
    "hostile shard": lambda folder: as_pickle(shard(folder, 1)),
    "hostile manifest": lambda folder: as_pickle(folder / "manifest.json"),
    "hostile .metadata": lambda folder: as_pickle(folder / ".metadata"),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """What a run said that found its newest checkpoint damaged, for each damage; all in one job."""
    root = tmp_path_factory.mktemp("damage")
    train([*FLAGS, "run_steps=6", f"ckpt_save_path={root / 'run'}"])
    runs = {name: root / name for name in DAMAGES}
    for name, run in runs.items():
        shutil.copytree(root / "run", run)
        DAMAGES[name](run / "checkpoints" / "step_6_ckp")
    ended = train_each([([*FLAGS, "run_steps=1", f"ckpt_save_path={run}"], []) for run in runs.values()])
    return {name: (run, first.output) for (name, run), (first, _) in zip(runs.items(), ended, strict=True)}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_damaged_file_is_named_and_the_newest_good_checkpoint_is_used(
    name: str, outputs: dict[str, tuple[Path, str]]
) -> None:
    run, output = outputs[name]
    (restored,) = [event for event in events_of(run) if event["event"] == "restore"]
    is_damaged = "metadata" not in name
    assert restored["checkpoint"] == str(run / "checkpoints" / f"step_{4 if is_damaged else 6}_ckp")
    assert len(restored["passed_over"]) == is_damaged == output.count(": skipped")  # one rank speaks
    assert all(f"{run}/checkpoints/step_6_ckp" in line for line in restored["passed_over"])
    assert "Stopped at step" in output and not (run.parent / "executed").exists()


def test_files_that_no_rank_loads_wholly_are_compared_too(tmp_path: Path) -> None:
    train([*FLAGS, "run_steps=6", "sharding_strategy=ddp", f"ckpt_save_path={tmp_path / 'run'}"])
    changes = {"other_layout": ["sharding_strategy=fsdp"], "weights_alone": ["weights_only=true"]}
    runs: list[FaultyRun] = []
    for name, flags in changes.items():
        source = tmp_path / f"damaged_for_{name}"
        shutil.copytree(tmp_path / "run", source)
        flip_a_bit(shard(source / "checkpoints" / "step_6_ckp", 1))
        flags += [f"ckpt_load_path={source}", f"ckpt_save_path={tmp_path / name}"]
        runs.append(([*FLAGS, "run_steps=1", *flags], []))
    for name, (first, _) in zip(changes, train_each(runs), strict=True):
        said = first.output
        source = tmp_path / f"damaged_for_{name}" / "checkpoints"
        assert f"{source}/step_4_ckp" in said and str(shard(source / "step_6_ckp", 1)) in said
        assert said.count(": skipped") == 1
