"""Starts jobs in which things happen (tests/faults/signals_worker.py) and reads what came of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from forked import ForkedProcess, run_forked, start_forked
from helpers import ROOT, free_ports
from safetensors.torch import load_file
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


def status_of(run: Path) -> dict[str, Any]:
    """A run's run_status.json."""
    status: dict[str, Any] = json.loads((run / "run_status.json").read_text())
    return status


def checkpoints_of(run: Path) -> set[str]:
    """Names of what lies in a run's folder of checkpoints, besides the link to the best."""
    return {path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()}


def evaluations_of(run: Path) -> dict[int, float]:
    """The evaluation losses of a run by step."""
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["evaluation_loss"] for line in lines if "evaluation_loss" in line}


def assert_same_tensors(checkpoint: Path, expected: Path) -> None:
    """Every tensor of two checkpoints is the same, bit for bit."""
    ours, theirs = tensors_of(checkpoint), tensors_of(expected)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every piece of a checkpoint by file and name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}
