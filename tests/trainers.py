"""Trainers of tiny models on made-up data, for the tests of `pretraining.Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import training_runs
from training_runs import TINY

from pretraining import Trainer
from pretraining.data.batch import ModelInputs
from pretraining.observability.metrics import Outputs

SETTINGS: dict[str, Any] = dict(flag.split("=") for flag in TINY) | {
    "use_dummy_dataset": True,
    "num_steps": 4,
    "held_out_fraction": 0.2,
    "eval_batches": 2,
}


class WithHits(Trainer):
    """Counts hits, as token_accuracy does."""

    def extra_metrics(self, outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        return {"hits": (outputs.hits.sum(), outputs.valid_tokens)}


def trainer(kind: type[Trainer], run: Path, **settings: Any) -> Any:
    return kind.from_recipe(**(SETTINGS | settings), ckpt_save_path=run)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    rates = ("_second", "time", "per_day", "memory", "data_share")
    lines = training_runs.metrics_of(run)
    return [{name: line[name] for name in line if not any(word in name for word in rates)} for line in lines]
