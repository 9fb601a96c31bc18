"""Starts jobs with faults (tests/faults/guarded_worker.py) and reads what came of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import ForkedProcess, run_forked, start_forked
from helpers import ROOT, free_ports
from training_runs import TINY

WORKER = ROOT / "tests" / "faults" / "guarded_worker.py"


def train_with_faults(processes: int, data_path: Path, runs: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Trains runs, each with a fault, in one job of so many processes; returns how each ended on each rank.

    Args:
        processes: of the job.
        data_path: datasets.
        runs: name of the fault and overrides on top of the tiny model's, of each run.
    """
    jobs = _jobs(data_path, runs)
    done = run_forked(WORKER, processes, [json.dumps(jobs)])
    print(done.stdout, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def start_without_launcher(processes: int, data_path: Path, fault: str, flags: list[str]) -> list[ForkedProcess]:
    """Starts a run with a fault as processes that nobody ends when one of them does."""
    return start_forked(WORKER, processes, [json.dumps(_jobs(data_path, [(fault, flags)]))])


def _jobs(data_path: Path, runs: Sequence[tuple[str, list[str]]]) -> list[tuple[int, str, list[str]]]:
    common = [*TINY, f"data_path={data_path}", "sep_token=0", "logical_shards=8", "batch_size=2"]
    ports = free_ports(len(runs))
    return [(port, fault, [*common, *flags]) for port, (fault, flags) in zip(ports, runs, strict=True)]
