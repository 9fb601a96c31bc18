"""What each start of a run was started with, and on what: a record a start in <run>/logs/environment.json.

    every rank: host, device, threads --gathered once--> rank 0 adds command line, commit, packages -> one more record

A record is there to compare starts by, and no start depends on it: what cannot be found is null, and what cannot be
written is a warning. Secrets are not written: of the environment only variables that are named here, and stars in the
command line for what looks like a key.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pretraining.config.fields import settings_of
from pretraining.config.training import TrainConfig
from pretraining.distributed.processes import Processes, gather_from_every_rank
from pretraining.errors import PathError
from pretraining.files import entries_of, read_json, write_atomic
from pretraining.launch.machine import usable_cores
from pretraining.observability.report_file import written_time
from pretraining.observability.throughput import device_name
from pretraining.observability.trackers import LOGS

log = logging.getLogger(__name__)

ENVIRONMENT_FILE = "environment.json"
MASK = "***"

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"),
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""Of the environment: what changes speed, sums or the place in a cluster, and is never a secret."""

_SECRET = "key|token|secret|passw|credential|auth"
_SECRET_FLAG = re.compile(rf"-{{0,2}}[\w.-]*({_SECRET})[\w.-]*", re.IGNORECASE)
_SECRET_OPTION = re.compile(rf"([\w.-]*(?:{_SECRET})[\w.-]*)=[^,\s]+", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(?<![\w-])(?:hf_|sk-|ghp_|github_pat_|glpat-|AKIA)[\w-]{12,}|(?<=://)[^/@\s]+(?=@)")
_INSTALLED = re.compile(r"(.+?)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def record_environment(run: Path, step: int, launcher: str, processes: Processes) -> None:
    """Adds a record of this start to the run's; a collective call.

    Args:
        step: that the start goes on from.
        launcher: what has started the processes.
    """
    mine = (socket.gethostname(), _name_of(processes.device), torch.get_num_threads(), usable_cores())
    everyone = gather_from_every_rank(lambda: mine)
    if not processes.is_main:
        return
    record = {
        "time": written_time(time.time()),
        "step": step,
        "command": shlex.join(masked(sys.argv)),
        "working_folder": _working_folder(),
        "git": _git_state(Path(__file__).parents[2]),
        "launcher": launcher,
        "processes": processes.world_size,
        "hosts": _by_host(everyone),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cuda": torch.version.cuda,
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": _packages(),
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
        aside = path.with_name(f"{path.name}.damaged")
        log.warning("%s is damaged (%s): it is %s now, and a new one begins", path, error, aside.name)
        path.replace(aside)
        return []
    return records


def masked(arguments: Sequence[str]) -> list[str]:
    """Returns arguments with stars in place of the values of flags that name a secret, and of values that look so."""
    shown, is_secret = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_secret and not argument.startswith("-"):
            shown.append(MASK)
            is_secret = False
            continue
        is_secret = (bool(equals) or argument.startswith("-")) and _names_a_secret(name)
        if is_secret and equals:
            shown.append(f"{name}={MASK}")
            is_secret = False
        else:
            shown.append(_SECRET_VALUE.sub(MASK, _SECRET_OPTION.sub(_mask_option, argument)))
    return shown


def _mask_option(found: re.Match[str]) -> str:
    return f"{found[1]}={MASK}" if _names_a_secret(found[1]) else found[0]


def _names_a_secret(flag: str) -> bool:
    """Whether the value of a flag may be a secret; of our own settings (sep_token, tokenizer_path) none is."""
    name = flag.lstrip("-").rpartition(".")[2].replace("-", "_")
    return bool(_SECRET_FLAG.fullmatch(flag)) and name not in settings_of(TrainConfig)


def _name_of(device: torch.device) -> str:
    return device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"


def _by_host(everyone: Sequence[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """What ranks have told, by host: (host, device, threads, cores) of each rank."""
    hosts: dict[str, dict[str, Any]] = {}
    for rank, (host, device, threads, cores) in enumerate(everyone):
        found = hosts.setdefault(host, {"host": host, "cores": cores, "ranks": [], "devices": [], "threads": []})
        for name, value in (("ranks", rank), ("devices", device), ("threads", threads)):
            found[name].append(value)
    return list(hosts.values())


def _working_folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return None


def _git_state(root: Path) -> dict[str, Any] | None:
    """Commit of this code, and whether its tracked files have been changed since; None where git does not know it."""
    commit, top = _git(root, "rev-parse", "HEAD"), _git(root, "rev-parse", "--show-toplevel")
    if commit is None or top is None or Path(top) != root.resolve():  # installed inside of another repository
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    """What git answers; None where it is missing, fails or takes long, as on a slow network file system."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _packages() -> dict[str, str]:
    """Versions of what is installed, by the names of the folders that say so: opening them all takes 0.2 s."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = sorted(path.name for path in entries_of(Path(folder)))  # the empty one is the working folder
        except PathError:  # an archive, or nothing
            continue
        for name in names:
            if match := _INSTALLED.fullmatch(name):
                found.setdefault(match[1], match[2])  # as an import, the first one counts
    return found
