"""A reader that goes away, and Ctrl-C, change neither whether a run trains nor what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_runs import EIGHT_STEPS
from forked import start_forked
from helpers import PATIENCE_SECONDS, ROOT
from tiers import first_quick
from training_runs import assert_same_tensors, checkpoints_of, losses_of, status_of

WORKER = ROOT / "tests" / "faults" / "streams_worker.py"


def train(fault: str, run: Path, *flags: str, processes: int = 1) -> tuple[set[int | None], str, str]:
    """Trains eight steps; returns the exit codes, and what all processes wrote to stdout and stderr."""
    job = start_forked(WORKER, processes, [fault, *EIGHT_STEPS, f"ckpt_save_path={run}", *flags])
    try:
        said = [process.communicate(timeout=PATIENCE_SECONDS) for process in job]
    finally:
        for process in job:
            process.kill()
    stdout, stderr = ("".join(texts) for texts in zip(*said, strict=True))
    return {process.returncode for process in job}, stdout, stderr


@pytest.mark.parametrize(
    ("fault", "progress"),
    [
        *(("stdout gone", "plain"), ("stdout full", "plain"), ("stdout closed", "plain")),
        *(("stderr closed", "plain"), ("both gone", "plain"), ("stdout gone", "live"), ("stdout full", "live")),
    ],
)
def test_a_run_outlives_its_readers(tmp_path: Path, fault: str, progress: str) -> None:
    codes, stdout, stderr = train(fault, tmp_path, f"progress={progress}")
    assert codes == {0} and status_of(tmp_path)["status"] == "finished"
    assert len(losses_of(tmp_path)) == 8 and "step_8_ckp" in checkpoints_of(tmp_path)
    if fault.startswith("stdout") and fault != "stdout closed":
        said = f"standard output cannot be written ({'Broken pipe' if 'gone' in fault else 'No space left on device'})"
        assert stderr.startswith(said) and stderr.count("\n") == 1
    assert "Traceback" not in stdout + stderr


@pytest.mark.parametrize("processes", first_quick(1, 2))
def test_ctrl_c_finishes_the_step_saves_and_names_the_way_to_resume(tmp_path: Path, processes: int) -> None:
    codes, _, stderr = train("Ctrl-C", tmp_path / "run", processes=processes)
    assert codes == {130} and "Traceback" not in stderr
    assert stderr.count("interrupted: the run stops after this step; Ctrl-C again stops it at once\n") == 1
    said = "Interrupted at step 3 of 8 (Ctrl-C): saved; the same command resumes from there.\n"
    assert stderr.endswith(said) and stderr.count(said) == 1
    status = status_of(tmp_path / "run")
    assert (status["status"], status["reason"], status["step"]) == ("preempted", "Ctrl-C", 3)
    assert checkpoints_of(tmp_path / "run") == {"step_3_ckp.preempt"}
    train("nothing", tmp_path / "run", processes=processes)
    train("nothing", tmp_path / "whole", processes=processes)
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_8_ckp" for name in ("run", "whole")))


def test_ctrl_c_twice_exits_at_once(tmp_path: Path) -> None:
    codes, _, stderr = train("Ctrl-C twice", tmp_path)
    assert codes == {130} and "Traceback" not in stderr
    assert stderr.endswith("interrupted; the same command resumes from what is complete\n")
    assert checkpoints_of(tmp_path) == set()
    status = status_of(tmp_path)
    assert (status["reason"], status["starts_without_progress"]) == ("KeyboardInterrupt", 0)
