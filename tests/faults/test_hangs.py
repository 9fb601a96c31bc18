"""A process or a read hangs. The other processes find it, name it and stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from forked import start_forked
from guarded_runs import start_without_launcher
from helpers import PATIENCE_SECONDS
from tiers import first_quick

RUN = ["num_steps=1000000", "report_interval=0"]
HUNG = 124

# Longer than a busy machine takes for a step, or for a start.
STEP, START = "hang_timeout=10s", "first_step_timeout=30s"


@pytest.mark.parametrize(("stopped", "context"), first_quick((1, 1), (0, 1), (1, 2)))
def test_the_peer_of_a_stopped_process_names_it_and_exits(
    stopped: int, context: int, data_path: Path, tmp_path: Path
) -> None:
    flags = [*RUN, STEP, "first_step_timeout=600s", f"ckpt_save_path={tmp_path / 'run'}"]
    flags += [f"context_parallel_size={context}"]
    processes = start_without_launcher(2, data_path, "tell_steps", flags)
    try:
        processes[stopped].wait_for_line(lambda line: "in step 5" in line)
        processes[stopped].send_signal(signal.SIGSTOP)
        other = processes[1 - stopped]
        _, stderr = other.communicate(timeout=PATIENCE_SECONDS)
        assert other.returncode == HUNG, stderr
        assert "the job hangs: no process made progress for" in stderr
        assert "train_step" in stderr  # where this process stands
        if stopped == 0:  # it also serves the store that it would be asked through
            assert "beside rank 0, does not" in stderr
        else:
            assert "rank 1 on " in stderr and "sends no heartbeats any more" in stderr
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("fault", "timeouts", "steps_done"),
    first_quick(
        ("hang_while_reading", [STEP, "first_step_timeout=600s"], 2),
        ("hang_at_the_first_read", ["hang_timeout=600s", START], 0),
    ),
)
def test_a_read_that_hangs_is_named_by_all(
    fault: str, timeouts: list[str], steps_done: int, data_path: Path, tmp_path: Path
) -> None:
    flags = [*RUN, *timeouts, f"ckpt_save_path={tmp_path / 'run'}"]
    processes = start_without_launcher(2, data_path, fault, flags)
    outputs = [process.communicate(timeout=PATIENCE_SECONDS) for process in processes]
    for process, (stdout, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == HUNG, stdout + stderr
        assert f"rank 1 is waiting for data after step {steps_done}" in stderr, stderr
    assert 'guarded_worker.py", line' in outputs[1][1] and "in reading" in outputs[1][1]  # its stacks show the read


def test_a_process_that_fails_alone_exits_at_once_with_collectives_in_flight(tmp_path: Path) -> None:
    flags = ["use_dummy_dataset=true", "model_variant=tiny", "seq_length=16", f"ckpt_save_path={tmp_path / 'run'}"]
    processes = start_forked(Path(__file__).parent / "alone_worker.py", 2, flags)
    try:
        (_, other), (_, alone) = (process.communicate(timeout=PATIENCE_SECONDS) for process in processes)
        assert [process.returncode for process in processes] == [1, 1]
        assert "error: rank 1: a file of this machine is gone" in alone
        assert "error: rank 0: another process of the job exited" in other
    finally:
        for process in processes:
            process.kill()
