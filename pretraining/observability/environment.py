"""Records of hardware and software, one per start, in <run>/logs/environment.json, for comparing starts.

A failed write is a warning. Packages that are not imported are null. A record has no text that a user typed, so no
secrets.
"""

from __future__ import annotations

import json
import logging
import platform
import socket
import sys
import time
from pathlib import Path

import torch

from pretraining.distributed.processes import Processes, gather_from_every_rank
from pretraining.files import exists, read_json, write_atomic
from pretraining.observability.report_file import format_time
from pretraining.observability.throughput import device_name
from pretraining.observability.trackers import ENVIRONMENT_FILE, LOGS

log = logging.getLogger(__name__)

PACKAGES = ("pretraining", "torch", "numpy", "pyarrow", "torchdata", "tokenizers", "safetensors", "torchao", "triton")


def record_environment(run: Path, step: int, launcher: str, processes: Processes) -> None:
    """Add the record of this start, which resumes from `step`; a collective call."""
    rank = {"host": socket.gethostname(), "device": device_name(processes.device), "threads": torch.get_num_threads()}
    ranks = gather_from_every_rank(lambda: rank)
    if not processes.is_main:
        return
    path, start = run / LOGS / ENVIRONMENT_FILE, {"time": format_time(time.time()), "step": step, "launcher": launcher}
    software = {"python": platform.python_version(), "system": platform.platform()}
    packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in PACKAGES}
    record = {**start, "processes": processes.world_size, "ranks": ranks, **software, "packages": packages}
    try:
        earlier = read_json(path) if exists(path) else []
        write_atomic(path, json.dumps([*earlier, record], indent=1) + "\n")
    except (OSError, ValueError, TypeError) as error:  # not writable, or damaged
        log.warning("%s cannot be updated (%s): it lacks this start", path, error)
