"""Faults around the writing of a checkpoint that test_matrix.py has no rows for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_runs import train
from tiers import first_quick
from training_runs import assert_same_tensors

EVALUATED = [
    *("num_steps=6", "checkpoint_interval=2", "keep_last=1"),
    *("held_out_fraction=0.1", "eval_interval=2", "eval_batches=1"),
]


def checkpoints_in(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def test_a_kill_in_an_asynchronous_save_keeps_best_and_the_older_checkpoint(tmp_path: Path) -> None:
    whole, killed = (
        [*EVALUATED, "async_save=true", f"ckpt_save_path={tmp_path / name}"] for name in ("whole", "killed")
    )
    train(whole)
    # Rank 1 writes nothing any more from step 4 on and is killed after step 5: training went on meanwhile.
    ended = train(killed, (1, "in_save", 2, "shard", "hang"), (1, "in_step", 6, "SIGKILL"), status=None)
    assert [each.status for each in ended] == [1, -9]
    assert "step 5/6" in ended[0].output
    left = checkpoints_in(tmp_path / "killed")
    assert {"best", "step_2_ckp"} < left and len(left) == 3 and any(name.endswith(".tmp") for name in left)
    assert str((tmp_path / "killed" / "checkpoints" / "best").readlink()) == "step_2_ckp"
    resumed = train(killed)[0].output
    assert "step_2_ckp, step 2" in resumed and ".tmp is incomplete: ignored" in resumed
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_6_ckp" for name in ("killed", "whole")))
    assert checkpoints_in(tmp_path / "killed") == checkpoints_in(tmp_path / "whole")


def test_a_start_after_a_kill_behind_the_last_commit_finds_best_and_removes_superseded_ones(tmp_path: Path) -> None:
    flags = [*EVALUATED, f"ckpt_save_path={tmp_path}"]
    train(flags, (0, "in_save", 3, "retention", "SIGKILL"), status=None)
    assert checkpoints_in(tmp_path) == {"best", "step_4_ckp", "step_6_ckp"}
    assert str((tmp_path / "checkpoints" / "best").readlink()) == "step_4_ckp"
    train(flags)
    assert checkpoints_in(tmp_path) == {"best", "step_6_ckp"}
    assert str((tmp_path / "checkpoints" / "best").readlink()) == "step_6_ckp"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model, and not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("asynchronous", first_quick(True, False), ids=["asynchronous", "synchronous"])
def test_a_full_disk_is_named_with_the_bytes_needed_and_the_older_checkpoint_stays(
    asynchronous: bool, small_disk: Path
) -> None:
    run = small_disk / "run"
    flags = ["num_steps=1000", "checkpoint_interval=2", f"async_save={asynchronous}", f"ckpt_save_path={run}"]
    ended = train(flags, status=1)
    errors = ended[0].stderr + ended[1].stderr
    assert errors.count("error:") == 1 and "Traceback" not in errors
    (line,) = (line for line in errors.splitlines() if line.startswith("error:"))
    assert str(run / "checkpoints" / "step_4_ckp") in line and "383,736 bytes" in line  # what the checkpoint takes
    assert checkpoints_in(run) == {"step_2_ckp"}  # what was written of the other is gone, too
    resumed = train([*flags, "run_steps=1"], status=None)
    assert f"from {run}/checkpoints/step_2_ckp, step 2" in resumed[0].output
