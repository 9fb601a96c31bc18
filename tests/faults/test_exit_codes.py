"""A signal to one process, or to the launcher, stops the job with the resumable exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from training_runs import TINY, checkpoints_of, status_of

pytestmark = pytest.mark.thorough

TORCHRUN = [sys.executable, str(ROOT / "scripts" / "torchrun.py"), "--standalone", "--nproc-per-node=2"]
ENDLESS = ["use_dummy_dataset=true", "num_steps=1000000", "report_interval=5"]


@contextmanager
def training(
    flags: Sequence[str], folder: Path, ignored: Sequence[signal.Signals] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Yield the launcher of a job that has begun to train in a folder."""
    command, pipe = [*TORCHRUN, str(ROOT / "main_training.py"), *flags], subprocess.PIPE
    with subprocess.Popen(
        command,
        env=plain_environment(),
        cwd=folder,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored] and None,
    ) as launcher:
        assert launcher.stdout is not None
        assert any(line.startswith("step 5/") for line in launcher.stdout), "the run has ended"
        yield launcher


def test_sigterm_stops_a_run_without_a_folder_for_good(tmp_path: Path) -> None:
    with training([*TINY, *ENDLESS[:2]], tmp_path) as launcher:
        launcher.send_signal(signal.SIGTERM)
        output, errors = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 143 and "Preempted at step" in errors and "nothing was saved" in errors
    assert "\nspeed  " in output and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        ("one process", signal.SIGTERM),
        *(("the launcher", number) for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGXCPU)),
    ],
)
def test_a_signal_stops_the_job_saved_and_resumable(whom: str, number: signal.Signals, tmp_path: Path) -> None:
    flags = [*(flag for flag in TINY if not flag.startswith("report")), *ENDLESS, f"ckpt_save_path={tmp_path}"]
    with training(flags, tmp_path) as launcher:
        if whom == "the launcher":
            launcher.send_signal(number)
        else:
            children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            subprocess.run(["kill", f"-{number.name.removeprefix('SIG')}", children[-1]], check=True)
        _, errors = launcher.communicate(timeout=PATIENCE_SECONDS)
    status = status_of(tmp_path)
    assert launcher.returncode == 75
    said = [line for line in errors.splitlines() if "Preempted" in line or "rror" in line]
    assert said == [
        f"Preempted at step {status['step']} of 1000000 ({number.name}): saved; the same command resumes from there."
    ]
    assert (status["status"], status["reason"]) == ("preempted", number.name)
    assert checkpoints_of(tmp_path) == {f"step_{status['step']}_ckp.preempt"}


def test_signals_that_are_ignored_at_the_start_stop_neither_launcher_nor_workers(tmp_path: Path) -> None:
    """As SIGHUP under nohup, and SIGINT and SIGQUIT in a background job of a shell."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR2)
    flags = [*(flag for flag in TINY if not flag.startswith(("report", "num_steps"))), *ENDLESS[::2], "num_steps=60"]
    with training([*flags, f"ckpt_save_path={tmp_path}"], tmp_path, ignored) as launcher:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for number in ignored:
            for process in (launcher.pid, *map(int, children)):
                os.kill(process, number)
        _, errors = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert (launcher.returncode, status_of(tmp_path)["status"]) == (0, "finished")
    assert "signal" not in errors.lower()
