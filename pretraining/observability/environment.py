"""What each start of a run ran on: a record per start in <run>/logs/environment.json.

A record is there to compare starts by, and no start depends on it: what cannot be found is null, and what cannot be
written is a warning. It holds nothing that a user typed, so no secret.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pretraining.distributed.processes import Processes, gather_from_every_rank
from pretraining.files import read_json, write_atomic
from pretraining.observability.report_file import written_time
from pretraining.observability.throughput import device_name
from pretraining.observability.trackers import LOGS

log = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("pretraining", "torch", "numpy", "pyarrow", "tokenizers", "safetensors", "torchao", "triton")


def record_environment(run: Path, step: int, launcher: str, processes: Processes) -> None:
    """Add a record of this start to the run's; a collective call.

    Args:
        step: that the start resumes from.
        launcher: what started the processes.
    """
    device = processes.device
    name = device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    everyone = gather_from_every_rank(lambda: (socket.gethostname(), name, torch.get_num_threads()))
    if not processes.is_main:
        return
    record = {
        "time": written_time(time.time()),
        "step": step,
        "launcher": launcher,
        "processes": processes.world_size,
        "ranks": [{"host": host, "device": its_device, "threads": threads} for host, its_device, threads in everyone],
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "git": _git_state(Path(__file__).parents[2]),
        "packages": {package: found for package in PACKAGES if (found := _version_of(package))},
    }
    path = run / LOGS / ENVIRONMENT_FILE
    try:
        write_atomic(path, json.dumps([*_earlier_records(path), record], indent=1) + "\n")
    except OSError as error:
        log.warning("%s cannot be written (%s): this start is not in it", path, error.strerror or error)


def _earlier_records(path: Path) -> list[Any]:
    try:
        records = read_json(path)
        if not isinstance(records, list):
            raise ValueError("it is no list")
    except FileNotFoundError:
        return []
    except ValueError as error:
        log.warning("%s is damaged (%s): it begins anew", path, error)
        return []
    return records


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit of this code, and whether its tracked files changed; None if git does not know it."""
    commit, top = _git(root, "rev-parse", "HEAD"), _git(root, "rev-parse", "--show-toplevel")
    if commit is None or top is None or Path(top) != root.resolve():  # installed inside of another repository
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git answers; None if it is missing, fails or takes long, as on a slow network file system."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
