"""torchrun's restarts, after a rank is killed, after a machine is lost and in a crash loop."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_runs import ALL, EIGHT_STEPS, WORKER, Fault, batches_of, job, train
from helpers import PATIENCE_SECONDS, ROOT, free_ports, plain_environment, run_command
from stand_in import StandIn
from training_runs import assert_same_tensors, checkpoints_of, losses_of, status_of

TORCHRUN = [sys.executable, str(ROOT / "scripts" / "torchrun.py")]

# A machine that is not heard from is given up after ten seconds in place of fifteen, one that may still come after ten
# in place of thirty; with less, a busy machine loses those that are there.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=10,last_call_timeout=10"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing has happened to, and its batches."""
    run = tmp_path_factory.mktemp("whole")
    train([*EIGHT_STEPS, f"ckpt_save_path={run}"], noting_batches(run))
    return run


def noting_batches(run: Path) -> Fault:
    (run / "notes").mkdir()
    return ALL, "note_batches", str(run / "notes")


def global_batches_of(run: Path) -> dict[int, list[int]]:
    return {step: sorted(rows) for step, rows in batches_of(run / "notes").items()}


def job_of(run: Path, *faults: Fault, flags: Sequence[str] = ("checkpoint_interval=3",)) -> str:
    return job([([*EIGHT_STEPS, f"ckpt_save_path={run}", *flags], faults)])


@pytest.mark.thorough
def test_a_job_restarts_by_itself_after_a_killed_rank(whole: Path, tmp_path: Path) -> None:
    runs = job_of(tmp_path, (1, "in_step_at_first", 4, "SIGKILL"))
    run_command([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", WORKER, runs])
    status = status_of(tmp_path)
    assert (status["status"], status["starts"], status["started_at_step"]) == ("finished", 2, 3)
    assert_same_tensors(tmp_path / "checkpoints" / "step_8_ckp", whole / "checkpoints" / "step_8_ckp")


@pytest.mark.thorough
def test_a_crash_loop_stops_and_names_the_remedy(tmp_path: Path) -> None:
    runs = job_of(tmp_path, (0, "in_step", 4, "bug"), flags=["checkpoint_interval=3", "max_starts_without_progress=1"])
    done = run_command([*TORCHRUN, "--standalone", "--nproc-per-node=1", "--max-restarts=2", WORKER, runs], check=False)
    assert done.returncode == 1
    # The first start got to a checkpoint, the second one did not, the third one was refused.
    assert done.stderr.count("[rank0]: ZeroDivisionError: division by zero") == 2
    assert "began at step 3 and ended before a new checkpoint" in done.stderr
    assert "--max_starts_without_progress=0" in done.stderr
    assert status_of(tmp_path)["starts"] == 2 and checkpoints_of(tmp_path) == {"step_3_ckp"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "code", "resumes_from"),
    [("SIGKILL to the launcher and SIGKILL", -signal.SIGKILL, 2), ("SIGTERM to the launcher", 75, None)],
)
def test_a_job_that_loses_a_machine_continues_with_the_same_global_batches(
    what: str, code: int, resumes_from: int | None, whole: Path, tmp_path: Path
) -> None:
    """From the newest checkpoint; where the machine had the time to, from the step at which it was told to leave."""
    (port,) = free_ports(1)
    faults = (0, "wait_for_company"), (1, "in_step", 4, what), noting_batches(tmp_path)
    runs = job_of(tmp_path, *faults, flags=["checkpoint_interval=2", "global_batch_size=4"])
    stand_in = StandIn(tmp_path / "scripts", real_torchrun=True)
    stand_in.train_with(WORKER)
    common = {"NNODES": "1:2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    machines = [
        subprocess.Popen(
            ["bash", stand_in.root / "scripts" / "train.sh", runs],
            # The address decides on ranks: the one that the others meet at is the first.
            env=plain_environment(
                {
                    **stand_in.variables(**common),
                    **{"PET_LOCAL_ADDR": address, "PET_RDZV_CONF": f"is_host={int(is_host)},{SOON}"},
                }
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for address, is_host in (("127.0.0.1", True), ("localhost", False))
    ]
    try:
        output, errors = machines[0].communicate(timeout=PATIENCE_SECONDS)
        machines[1].communicate(timeout=PATIENCE_SECONDS)
    finally:
        for machine in machines:
            machine.terminate()
    assert machines[0].returncode == 0, output + errors
    assert machines[1].returncode == code
    status = status_of(tmp_path)
    assert status["status"] == "finished"
    assert status["started_at_step"] == resumes_from or (resumes_from is None and status["started_at_step"] >= 4)
    assert global_batches_of(tmp_path) == global_batches_of(whole)
    assert losses_of(tmp_path) == pytest.approx(losses_of(whole), rel=1e-4)
