"""Records of hardware and software, one per start, in <run>/logs/environment.json, for comparing starts.

Unknown values are null, and a failed write is a warning. A record has no text that a user typed, so no secrets.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import subprocess
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from pretraining.distributed.processes import Processes, gather_from_every_rank
from pretraining.files import exists, read_json, write_atomic
from pretraining.observability.report_file import format_time
from pretraining.observability.throughput import device_name
from pretraining.observability.trackers import LOGS

log = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"
PACKAGES = ("pretraining", "torch", "numpy", "pyarrow", "torchdata", "tokenizers", "safetensors", "torchao", "triton")


def record_environment(run: Path, step: int, launcher: str, processes: Processes) -> None:
    """Add the record of this start; a collective call.

    Args:
        step: step from which the run resumes.
        launcher: name of the launcher.
    """
    device = processes.device
    name = device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
    rank = {"host": socket.gethostname(), "device": name, "threads": torch.get_num_threads()}
    ranks = gather_from_every_rank(lambda: rank)
    if not processes.is_main:
        return
    record = {
        "time": format_time(time.time()),
        "step": step,
        "launcher": launcher,
        "processes": processes.world_size,
        "ranks": ranks,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "git": _git_state(Path(__file__).parents[2]),
        "packages": _versions(),
    }
    path = run / LOGS / ENVIRONMENT_FILE
    try:
        earlier = read_json(path) if exists(path) else []
        write_atomic(path, json.dumps([*earlier, record], indent=1) + "\n")
    except (OSError, ValueError, TypeError) as error:  # not writable, or damaged
        log.warning("%s cannot be updated (%s): it lacks this start", path, error)


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit of this code, and whether tracked files have changes; None if git fails.

    A repository that merely contains the installed package does not count.
    """
    if not exists(root / ".git"):
        return None
    # `git describe --dirty` would take a lock, which a full disk leaves behind.
    command = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    first, *others = done.stdout.splitlines()  # headers begin with "#"; the other lines are changed files
    return {"commit": first.removeprefix("# branch.oid "), "dirty": any(not line.startswith("#") for line in others)}
