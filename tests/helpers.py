"""What tests share that start programs: free ports, a plain environment, and a run to the end.

Import it as `from helpers import run_command` (pyproject.toml puts this folder on the path).
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent

PATIENCE_SECONDS = 900.0
"""How long a test waits for what should come within seconds: a busy machine may stand still for minutes, and only what
hangs waits this long. pytest's own limit for a test is a little longer."""

# What launchers leave in the environment; a test must not inherit the layout of the job that runs it.
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL", "HYDRA_", "TORCHELASTIC_")
LAUNCHER_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def free_ports(count: int) -> list[int]:
    """TCP ports that nothing listens on now.

    From below those that the system gives to outgoing connections, which come and go until a port is used.
    """
    ports: list[int] = []
    with ExitStack() as stack:  # all open at once, so that they differ
        while len(ports) < count:
            candidate = stack.enter_context(socket.socket())
            try:
                candidate.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            except OSError:
                continue
            ports.append(candidate.getsockname()[1])
    return ports


def plain_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child process: ours without launchers' variables, one thread, this checkout on the path.

    Args:
        changes: variables to set on top.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    environment["OMP_NUM_THREADS"] = environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    environment.update(changes or {})
    return environment


def run_command(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path = ROOT,
    stdout: int | IO[str] = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end.

    Past `PATIENCE_SECONDS` it gets SIGTERM (launchers then end their workers), and the test fails.

    Args:
        command: program and arguments.
        environment: variables on top of `plain_environment()`.
        check: fail the test, showing the output, unless the exit code is 0.
        cwd: folder to run in.

    Returns:
        exit code, stdout and stderr as text.
    """
    arguments = [str(part) for part in command]
    process = subprocess.Popen(
        arguments,
        env=plain_environment(environment),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        out, err = _stop(process)
        raise AssertionError(_describe(arguments, f"ran past {PATIENCE_SECONDS:.0f} s", out, err)) from None
    if check and process.returncode != 0:
        raise AssertionError(_describe(arguments, f"exited with {process.returncode}", out, err))
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a process that this module started; SIGKILL only if it outlives SIGTERM by torchrun's grace time of 30 s."""
    process.terminate()
    try:
        return process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _describe(arguments: list[str], outcome: str, stdout: str, stderr: str) -> str:
    return f"{' '.join(arguments)}\n{outcome}\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
