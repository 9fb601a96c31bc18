"""torchrun's restarts: faults 1 (a rank is killed), 27 (a machine is lost) and 30 (a crash loop)."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from faulty_runs import WORKER, assert_same_tensors, checkpoints_of, job, status_of, train_with_faults
from helpers import ROOT, free_ports, plain_environment, run_command
from training_runs import losses_of

TORCHRUN = [sys.executable, str(ROOT / "scripts" / "torchrun.py")]

# A machine that does not come back is given up after three seconds in place of fifteen, one that may still come after
# one in place of thirty.
SOON = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nothing has happened to, and its batches."""
    run = tmp_path_factory.mktemp("whole")
    (run / "notes").mkdir()
    train_with_faults(2, [("nothing", [f"ckpt_save_path={run}"])], {"NOTES": str(run / "notes")})
    return run


def batches_of(run: Path) -> dict[int, list[int]]:
    """Checksums of the rows of each step's global batch, over all ranks; of the last attempt that has made the step."""
    attempts: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in (run / "notes").iterdir():
        for line in path.read_text().splitlines():
            step, row = map(int, line.split())
            attempts[step][int(path.name.partition(".")[0])].append(row)
    return {step: sorted(made[max(made)]) for step, made in sorted(attempts.items())}


def test_a_job_goes_on_by_itself_where_a_rank_was_killed(whole: Path, tmp_path: Path) -> None:
    runs = job([("killed at first", [f"ckpt_save_path={tmp_path}", "checkpoint_interval=3"])])
    run_command([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", WORKER, runs])
    status = status_of(tmp_path)
    assert (status["status"], status["starts"], status["started_at_step"]) == ("finished", 2, 3)
    assert_same_tensors(tmp_path / "checkpoints" / "step_8_ckp", whole / "checkpoints" / "step_8_ckp")


def test_a_crash_loop_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    flags = [f"ckpt_save_path={tmp_path}", "checkpoint_interval=3", "max_starts_without_progress=1"]
    runs = job([("fails", flags)])
    done = run_command([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=2", WORKER, runs], check=False)
    assert done.returncode == 1
    # The first start got to a checkpoint, the second one did not, the third one was refused.
    assert done.stderr.count("RuntimeError: division by cucumber") == 2
    assert "crash loop: its last start went on from step 3 and crashed before a new checkpoint" in done.stderr
    assert "--max_starts_without_progress=0" in done.stderr
    assert status_of(tmp_path)["starts"] == 2 and checkpoints_of(tmp_path) == {"step_3_ckp"}


def test_a_job_that_loses_a_machine_goes_on_with_those_left_and_the_same_global_batches(
    whole: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (port,) = free_ports(1)
    runs = job([("loses its node", [f"ckpt_save_path={tmp_path}", "checkpoint_interval=2", "global_batch_size=4"])])
    elastic = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    machines = [
        subprocess.Popen(
            # The address decides on ranks: the one that the others meet at is the first.
            [
                *(*TORCHRUN, *elastic, f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr={address}"),
                *(f"--rdzv-conf=is_host={int(is_host)},{SOON}", str(WORKER), runs),
            ],
            env=plain_environment({"NOTES": str(tmp_path / "notes")}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for address, is_host in (("127.0.0.1", True), ("localhost", False))
    ]
    try:
        output, errors = machines[0].communicate(timeout=200)
        machines[1].communicate(timeout=20)
    finally:
        for machine in machines:
            machine.terminate()
    assert machines[0].returncode == 0, output + errors
    assert machines[1].returncode == -9
    status = status_of(tmp_path)
    assert (status["status"], status["started_at_step"]) == ("finished", 2)
    assert batches_of(tmp_path) == batches_of(whole)
    assert losses_of(tmp_path) == pytest.approx(losses_of(whole), rel=1e-4)
