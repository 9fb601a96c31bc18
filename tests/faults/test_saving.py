"""Faults while a checkpoint is written.

Every run here is compared with one that nothing happened to, bit for bit.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.forked_job import run_job
from tiers import first_quick
from training_runs import assert_same_tensors

COMMON = ["num_steps=6", "checkpoint_interval=2", "keep_last=1", "batch_size=2"]
EVALUATED = [*COMMON, "held_out_fraction=0.1", "eval_interval=2", "eval_batches=1"]


def checkpoints_in(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    run_job([[*COMMON, f"ckpt_save_path={folder / 'run'}"]])
    assert checkpoints_in(folder / "run") == {"step_6_ckp"}
    return folder / "run" / "checkpoints" / "step_6_ckp"


@pytest.mark.parametrize(
    ("rank", "place", "resumes_from"),
    first_quick((0, "shard", 2), (1, "shard", 2), (0, "manifest", 2), (0, "commit", 2), (0, "retention", 4)),
)
def test_after_a_kill_in_a_save_the_older_checkpoint_loads_and_the_partial_one_is_named(
    rank: int, place: str, resumes_from: int, tmp_path: Path, expected: Path
) -> None:
    flags = [*COMMON, f"ckpt_save_path={tmp_path / 'run'}"]
    ended = run_job([flags], fault=("kill_in_save", rank, place, 2), check=False)
    assert ended[rank].status == -9 and ended[1 - rank].status == 1
    assert "another process of the job exited" in ended[1 - rank].output
    assert "step_2_ckp" in checkpoints_in(tmp_path / "run")
    resumed = run_job([flags])[0].output
    assert f"from {tmp_path}/run/checkpoints/step_{resumes_from}_ckp, step {resumes_from}" in resumed
    assert (".tmp is incomplete: ignored" in resumed) == (resumes_from == 2)
    assert checkpoints_in(tmp_path / "run") == {"step_6_ckp"}
    assert_same_tensors(tmp_path / "run" / "checkpoints" / "step_6_ckp", expected)


def test_a_kill_in_an_asynchronous_save_keeps_best_and_the_older_checkpoint(tmp_path: Path) -> None:
    whole, killed = (
        [*EVALUATED, "async_save=true", f"ckpt_save_path={tmp_path / name}"] for name in ("whole", "killed")
    )
    run_job([whole])
    # Rank 1 writes nothing any more from step 4 on and is killed at step 5: training went on meanwhile.
    fault = ("kill_while_writing_beside_the_training", 1, 2, 5)
    ended = run_job([killed], fault=fault, check=False)
    assert [each.status for each in ended] == [1, -9]
    assert "step 5/6" in ended[0].output
    left = checkpoints_in(tmp_path / "killed")
    assert {"best", "step_2_ckp"} < left and len(left) == 3 and any(name.endswith(".tmp") for name in left)
    assert str((tmp_path / "killed" / "checkpoints" / "best").readlink()) == "step_2_ckp"
    resumed = run_job([killed])[0].output
    assert "step_2_ckp, step 2" in resumed and ".tmp is incomplete: ignored" in resumed
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_6_ckp" for name in ("killed", "whole")))
    assert checkpoints_in(tmp_path / "killed") == checkpoints_in(tmp_path / "whole")


def test_a_start_after_a_kill_behind_the_last_commit_finds_best_and_removes_superseded_ones(
    tmp_path: Path,
) -> None:
    flags = [*EVALUATED, f"ckpt_save_path={tmp_path / 'run'}"]
    run_job([flags], fault=("kill_in_save", 0, "retention", 3), check=False)
    assert checkpoints_in(tmp_path / "run") == {"best", "step_4_ckp", "step_6_ckp"}
    assert str((tmp_path / "run" / "checkpoints" / "best").readlink()) == "step_4_ckp"
    run_job([flags])
    assert checkpoints_in(tmp_path / "run") == {"best", "step_6_ckp"}
    assert str((tmp_path / "run" / "checkpoints" / "best").readlink()) == "step_6_ckp"


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
    asynchronous: bool, small_disk: Path, tmp_path: Path
) -> None:
    run = small_disk / "run"
    flags = ["num_steps=1000", "checkpoint_interval=2", f"async_save={asynchronous}", f"ckpt_save_path={run}"]
    ended = run_job([flags], check=False)
    assert [each.status for each in ended] == [1, 1]
    output = ended[0].output + ended[1].output
    assert output.count("error:") == 1 and "Traceback" not in output
    (line,) = (line for line in output.splitlines() if line.startswith("error:"))
    assert str(run / "checkpoints" / "step_4_ckp") in line and "383,736 bytes" in line  # what the checkpoint takes
    assert checkpoints_in(run) == {"step_2_ckp"}  # what was written of the other is gone, too
    resumed = run_job([[*flags, "run_steps=1"]], check=False)
    assert f"from {run}/checkpoints/step_2_ckp, step 2" in resumed[0].output


def test_a_file_size_limit_of_the_system_is_one_error(tmp_path: Path) -> None:
    flags = [*COMMON, f"ckpt_save_path={tmp_path / 'run'}"]
    ended = run_job([flags], fault=("limit_file_size", 50_000), check=False)
    assert [each.status for each in ended] == [1, 1]
    output = ended[0].output + ended[1].output
    assert output.count("error:") == 1 and os.strerror(errno.EFBIG) in output
    assert checkpoints_in(tmp_path / "run") == set()


def test_transient_errors_are_retried(tmp_path: Path, expected: Path) -> None:
    flags = [*COMMON, f"ckpt_save_path={tmp_path / 'run'}"]
    ended = run_job([flags], fault=("fail_first_writes", 2))
    assert [each.output.count("Input/output error") for each in ended] == [2, 2]
    assert_same_tensors(tmp_path / "run" / "checkpoints" / "step_6_ckp", expected)
