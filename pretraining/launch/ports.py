"""Ports that processes agree on without talking to each other, or that nobody else uses.

Derived ports lie in 16384..32767: above most services of a machine, below the range from which Linux gives ports to
outgoing connections (32768 and up), so that chance seldom takes them.
"""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

FIRST_PORT = 16384
PORTS = 16384
STEPS_OF_A_JOB = 16


def free_port() -> int:
    """A TCP port of this machine that nothing listens on right now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_of_slurm_step(job: int, step: int) -> int:
    """The port of a SLURM step: different for 16 steps of each of any 1024 jobs in a row."""
    return FIRST_PORT + (job * STEPS_OF_A_JOB + step % STEPS_OF_A_JOB) % PORTS


def port_of_name(name: str) -> int:
    """The same port for the same name in every process (`hash()` is salted in each)."""
    return FIRST_PORT + zlib.crc32(name.encode()) % PORTS


def ancestor_named(name: str, pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """The closest ancestor process with this command name, seen through any shell scripts in between.

    Args:
        name: what `ps -o comm` shows: at most 15 characters.
        pid: where to start.
        proc: the process file system.

    Returns:
        its process id; None where there is none, or no /proc.
    """
    while str(pid) not in ("0", "1"):
        try:
            stat = (proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        # "pid (command) state parent ..."; a command may hold blanks and brackets itself.
        command, _, rest = stat.partition("(")[2].rpartition(")")
        if command == name:
            return int(stat.split()[0])
        pid = rest.split()[1]
    return None
