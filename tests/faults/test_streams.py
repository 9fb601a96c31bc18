"""A reader that goes away, and Ctrl-C, change neither whether a run trains nor what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_runs import ALL, EIGHT_STEPS, Fault
from faulty_runs import train as train_with
from tiers import first_quick
from training_runs import assert_same_tensors, checkpoints_of, losses_of, status_of

CTRL_C = (ALL, "in_step", 3, "SIGINT")


def train(run: Path, status: int, *faults: Fault, processes: int = 1, more: Sequence[str] = ()) -> str:
    """Train eight steps; return what all processes wrote to stderr, rank 0 last."""
    ended = train_with([*EIGHT_STEPS, f"ckpt_save_path={run}", *more], *faults, processes=processes, status=status)
    assert "Traceback" not in "".join(each.output for each in ended)
    return "".join(each.stderr for each in reversed(ended))


@pytest.mark.parametrize(
    ("streams", "kind", "progress"),
    [
        *(([1], "gone", "plain"), ([1], "full", "plain"), ([1], "closed", "plain"), ([2], "closed", "plain")),
        *(([1, 2], "gone", "plain"), ([1], "gone", "live"), ([1], "full", "live")),
    ],
)
def test_a_run_outlives_its_readers(streams: list[int], kind: str, progress: str, tmp_path: Path) -> None:
    faults = [(0, "make_stream", stream, kind) for stream in streams]
    stderr = train(tmp_path, 0, *faults, more=[f"progress={progress}"])
    assert status_of(tmp_path)["status"] == "finished"
    assert len(losses_of(tmp_path)) == 8 and "step_8_ckp" in checkpoints_of(tmp_path)
    if streams == [1] and kind != "closed":
        said = f"standard output cannot be written ({'Broken pipe' if kind == 'gone' else 'No space left on device'})"
        assert stderr.startswith(said) and stderr.count("\n") == 1


@pytest.mark.parametrize("processes", first_quick(1, 2))
def test_ctrl_c_finishes_the_step_saves_and_names_the_way_to_resume(tmp_path: Path, processes: int) -> None:
    run = tmp_path / "run"
    stderr = train(run, 130, CTRL_C, processes=processes)
    assert stderr.count("interrupted: the run stops before its next step; Ctrl-C again stops it at once\n") == 1
    said = "Interrupted at step 3 of 8 (Ctrl-C): saved; the same command resumes from there.\n"
    assert stderr.endswith(said) and stderr.count(said) == 1
    status = status_of(run)
    assert (status["status"], status["reason"], status["step"]) == ("preempted", "Ctrl-C", 3)
    assert checkpoints_of(run) == {"step_3_ckp.preempt"}
    train(run, 0, processes=processes)
    train(tmp_path / "whole", 0, processes=processes)
    assert_same_tensors(*(tmp_path / name / "checkpoints" / "step_8_ckp" for name in ("run", "whole")))


def test_ctrl_c_twice_exits_at_once(tmp_path: Path) -> None:
    stderr = train(tmp_path, 130, (0, "in_step", 3, "SIGINT and SIGINT"))
    assert stderr.endswith("interrupted; the same command resumes from what is complete\n")
    assert checkpoints_of(tmp_path) == set()
    status = status_of(tmp_path)
    assert (status["reason"], status["starts_without_progress"]) == ("KeyboardInterrupt", 0)
