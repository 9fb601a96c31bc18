"""A dataset small enough to train on in a test, runs on it, and what they reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from forked import run_forked
from helpers import free_ports
from safetensors.torch import load_file

VOCABULARY = 64

# A model of some 30,000 parameters, in float32 so that runs compare to rounding.
TINY = [
    *("model_variant=tiny", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=3", "num_attention_heads=4"),
    *("num_key_value_heads=2", f"vocab_size={VOCABULARY}", "seq_length=32", "mixed_precision=false"),
    *("learning_rate=1e-3", "report_interval=1", "tracker=none", "progress=plain"),
]

# Every switch of the model away from its neutral value.
EVERY_SWITCH = [
    *("head_dim=12", "attention_bias=true", "mlp_bias=true", "qk_norm=whole", "norm_position=post"),
    *("no_rope_interval=2", "rope_scaling=yarn:4,16", "attention_multiplier=0.2", "logits_scaling=4"),
    *("embedding_multiplier=3", "residual_multiplier=0.5"),
]

# The settings of the golden loss curve: a global batch that most numbers of processes do not divide, and two datasets.
GOLDEN_RUN = [
    "num_steps=30",
    "global_batch_size=10",
    "batch_size=2",
    "datasets=first,second",
    "weights=3,1",
]


def write_two_datasets(root: Path) -> Path:
    """Writes two small datasets, `first` and `second`, and returns their folder."""
    write_dataset(root / "first")
    write_dataset(root / "second", documents=200, seed=1)
    return root


def write_dataset(folder: Path, documents: int = 400, seed: int = 0) -> None:
    """Writes documents whose next token mostly follows from the last one: something to learn."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    rows = []
    for _ in range(documents):
        length = int(generator.integers(5, 120))
        steps = generator.choice([1, 2, 7], size=length, p=[0.7, 0.2, 0.1])
        start = generator.integers(VOCABULARY)
        rows.append(((start + np.cumsum(steps)) % (VOCABULARY - 1) + 1).astype(np.uint16))
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.uint16()))})
    with pa.ipc.new_file(folder / "part-0.arrow", table.schema) as writer:
        writer.write_table(table)


def train_runs(processes: int, data_path: Path, runs: Sequence[Sequence[str]]) -> None:
    """Trains several runs in one job of `processes` processes; each run is a list of overrides on top of `TINY`."""
    common = [*TINY, f"data_path={data_path}", "sep_token=0", "logical_shards=8"]
    jobs = [(port, [*common, *run]) for port, run in zip(free_ports(len(runs)), runs, strict=True)]
    run_forked(Path(__file__).parent / "distributed" / "training_worker.py", processes, [json.dumps(jobs)])


def losses_of(run: Path) -> list[float]:
    """The loss of each step, as the run reported it."""
    return [report["loss"] for report in reports_of(run)]


def reports_of(run: Path) -> list[dict[str, Any]]:
    """The reports of a run, without its evaluations."""
    return metrics_of(run, "loss")


def metrics_of(run: Path, name: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that hold a value of this name."""
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if name in line]


def events_of(run: Path) -> list[dict[str, Any]]:
    """What happened to a run, without the time of day."""
    lines = [json.loads(line) for line in (run / "logs" / "events.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def status_of(run: Path) -> dict[str, Any]:
    """A run's run_status.json."""
    status: dict[str, Any] = json.loads((run / "run_status.json").read_text())
    return status


def checkpoints_of(run: Path) -> set[str]:
    """Names of what lies in a run's folder of checkpoints, besides the link to the best."""
    return {path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink()}


def shards_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every piece of a checkpoint by file and name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_tensors(checkpoint: Path, expected: Path) -> None:
    """Every tensor of two checkpoints is the same, bit for bit."""
    ours, theirs = shards_of(checkpoint), shards_of(expected)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
