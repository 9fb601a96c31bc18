"""Under a real SLURM, a job saves ahead of its time limit and is queued again; one that is cancelled is not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from training_runs import checkpoints_of, status_of

pytestmark = pytest.mark.thorough


def test_a_job_saves_ahead_of_its_time_limit_is_requeued_and_stops_when_cancelled(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    job = slurm.run(
        [
            # SLURM looks every 30 seconds, and sends signals early rather than late: here after 30 to 60 seconds, in
            # which a busy machine may not come to train; then a later start does.
            *("sbatch", "--parsable", "--nodes=1", "--gpus-per-node=0", "--time=2", "--signal=USR1@60"),
            *(f"--output={output}", "scripts/train.slurm"),
            *("--use_dummy_dataset=true", "--model_variant=tiny", "--num_hidden_layers=1", "--vocab_size=256"),
            *("--seq_length=32", "--batch_size=1", "--num_steps=1000000", "--tracker=none", "--report_interval=10"),
            *("--max_starts_without_progress=0", "--checkpoint_interval=0"),  # its only checkpoints are those of ends
            f"--ckpt_save_path={run}",
        ],
        {"VIRTUAL_ENV": sys.prefix, "NPROC": "2"},
    ).stdout.strip()

    def has_gone_on() -> bool:
        text = output.read_text() if output.exists() else ""
        return re.search(r"^step [\d,]+/.* loss ", text.partition("ckp.preempt, step")[2], re.MULTILINE) is not None

    try:
        slurm.wait_until(has_gone_on, "the job has gone on")
        first = status_of(run)
        slurm.run(["scancel", job])
        slurm.wait_until(lambda: slurm.state_of(job) == "CANCELLED", "the job has ended")
    finally:
        slurm.run(["scancel", job], check=False)

    text = output.read_text()
    assert "(SIGUSR1): saved; the same command resumes from there" in text, text
    assert "train.slurm: saved ahead of the end of the job; it is queued again" in text
    assert f"start       from {run}/checkpoints/step_{first['started_at_step']}_ckp.preempt" in text
    # The cancelled job has saved, too, but stays ended.
    status = status_of(run)
    assert status["status"] == "preempted"
    # Of scancel, in training or, on a machine that is slow, in the start after a second limit of a minute.
    assert "SIGTERM" in status["reason"] or "SIGUSR1" in status["reason"]
    assert status["step"] > first["started_at_step"] > 0
    assert checkpoints_of(run) == {f"step_{status['step']}_ckp.preempt"}
    assert text.count("queued again") >= first["starts"] - 1 >= 1
