"""Starts jobs in which things happen (tests/faults/signals_worker.py) and reads what came of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from forked import ForkedProcess, run_forked, start_forked
from helpers import ROOT, free_ports
from training_runs import TINY

WORKER = ROOT / "tests" / "faults" / "signals_worker.py"

# Eight steps, an evaluation every third one and at the end; nothing is saved before the end unless a run says so.
EIGHT_STEPS = [
    *TINY,
    *("use_dummy_dataset=true", "num_steps=8", "batch_size=2", "checkpoint_interval=0"),
    *("held_out_fraction=0.1", "eval_interval=3", "eval_batches=5", "save_best=false"),
]


def job(runs: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The worker's argument for runs, each with the name of a fault and flags on top of `EIGHT_STEPS`."""
    ports = free_ports(len(runs))
    return json.dumps([(port, fault, [*EIGHT_STEPS, *flags]) for port, (fault, flags) in zip(ports, runs, strict=True)])


def train_with_faults(
    processes: int, runs: Sequence[tuple[str, Sequence[str]]], environment: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Trains runs one after the other in one job; returns what each came to on each rank."""
    done = run_forked(WORKER, processes, [job(runs)], environment)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def start_ranks(processes: int, fault: str, flags: Sequence[str]) -> list[ForkedProcess]:
    """Starts the processes of a job by themselves, without a launcher that would end them together."""
    return start_forked(WORKER, processes, [job([(fault, flags)])])
