"""Scripts as processes of a job that start in a tenth of a second: forked from a server that has imported everything.

`run_forked` does without torchrun and without seconds of imports in each process. Tests of launchers, of restarts and
of the interpreter's end start real processes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path

from helpers import PATIENCE_SECONDS, ROOT, free_ports, plain_environment

GRACE_SECONDS = 30


def fork_context() -> ForkServerContext:
    """The way to start processes from the server; the first use starts it."""
    context = multiprocessing.get_context("forkserver")
    # The last one is imported at some later point of every run, and takes longer than all the rest.
    context.set_forkserver_preload(["pretraining.cli", "pretraining.train.run", "safetensors.torch", "torch._dynamo"])
    return context


class ForkedProcess:
    """A script in a process of its own, with the part of `subprocess.Popen` that tests use.

    Args:
        script: run as the main program.
        arguments: its arguments.
        variables: its whole environment.
        cwd: folder to run in.
    """

    def __init__(self, script: Path, arguments: Sequence[str], variables: Mapping[str, str], cwd: Path = ROOT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._said = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for path in self._said:
            path.touch()
        work = (script, list(arguments), dict(variables), self._said, cwd)
        self._process = fork_context().Process(target=_work, args=work)
        self._process.start()

    @property
    def sentinel(self) -> int:
        """Is ready once the process has ended."""
        return self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """The exit status; negative: the signal that ended it; None: it runs."""
        return self._process.exitcode

    @property
    def pid(self) -> int | None:
        """The process's number."""
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self._process.pid is not None and self.returncode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns what the process has written to stdout and stderr once it has ended.

        Raises:
            TimeoutExpired: it has not ended; ask again.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        stdout, stderr = (path.read_text() for path in self._said)
        return stdout, stderr


def start_forked(
    script: Path,
    processes: int,
    args: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[ForkedProcess]:
    """Starts a script as the processes of a job that nobody ends when one of them does."""
    (port,) = free_ports(1)
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        variables = {name: str(value) for name, value in place.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(environment or {})}
        started.append(ForkedProcess(script, args, plain_environment(variables), cwd))
    return started


def run_forked(
    script: Path,
    processes: int,
    args: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs a script as the processes of a job to its end; one that fails ends the others, as under torchrun.

    Args:
        script: path of a Python script.
        processes: how many.
        args: arguments of the script.
        environment: variables on top of `plain_environment()`.
        check: fail the test, showing the output, unless every process succeeded.
        cwd: folder to run in.

    Returns:
        exit code (1 if any process failed), and what all have written, one after the other.
    """
    job = start_forked(script, processes, args, environment, cwd)
    try:
        is_in_time = _wait_for_job(job, time.monotonic() + PATIENCE_SECONDS)
    finally:
        for process in job:
            process.kill()
    outputs = [process.communicate() for process in job]
    codes = [process.returncode for process in job]
    stdout, stderr = ("".join(texts) for texts in zip(*outputs, strict=True))
    if not is_in_time or (check and any(codes)):
        outcome = f"exited with {codes}" if is_in_time else f"ran past {PATIENCE_SECONDS:.0f} s"
        raise AssertionError(f"{script} {list(args)}\n{outcome}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    return subprocess.CompletedProcess([str(script), *args], int(any(codes)), stdout, stderr)


def _wait_for_job(job: Sequence[ForkedProcess], deadline: float) -> bool:
    """Waits until all have ended; past the deadline, or once one has failed, they are asked to end.

    Returns:
        Whether all ended, or one failed, before the deadline.
    """
    running = {process.sentinel: process for process in job}
    ends = is_late = False
    while running:
        ready = wait(running, timeout=max(0.0, deadline - time.monotonic()))
        failed = not ready or any(running.pop(sentinel).returncode for sentinel in ready if isinstance(sentinel, int))
        if failed and ends and not ready:
            break  # they have had their grace time
        if failed and not ends:
            ends, is_late, deadline = True, not ready, time.monotonic() + GRACE_SECONDS
            for process in running.values():
                process.send_signal(signal.SIGTERM)
    return not is_late


def _work(script: Path, arguments: list[str], variables: dict[str, str], said: list[Path], cwd: Path) -> None:
    """In the forked process."""
    for path, number in zip(said, (1, 2), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
