"""Folders of runs as training leaves them, written by hand, so that each test says what stands in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pretraining.config.command_line import load_train_config
from pretraining.config.recipes import dump_config

TINY = [
    *("use_dummy_dataset=true", "model_variant=tiny", "hidden_size=16", "num_attention_heads=2", "num_hidden_layers=1"),
    *("vocab_size=64", "seq_length=16", "batch_size=2", "num_steps=40"),
]


def written(seconds: int) -> str:
    return f"2026-11-20T10:{seconds // 60 % 60:02d}:{seconds % 60:02d}Z"


def training_report(step: int, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl, with a second per step."""
    at = {"step": step, "time": written(step), "tokens_seen": step * 32}
    numbers = {"loss": 4.0 + 4.0 / (1 + step), "z_loss": 0.0, "learning_rate": 1e-3, "learning_rate_group_0": 1e-3}
    return {**at, **numbers, "grad_norm": 1.0, "tokens_per_second_per_gpu": 64.0, "mfu": None, **values}


def evaluation_report(step: int, loss: float, **values: Any) -> dict[str, Any]:
    at = {"step": step, "time": written(step), "tokens_seen": step * 32}
    return {**at, "evaluation_loss": loss, "evaluation_perplexity": math.exp(loss), **values}


def event(name: str, at: int, /, **details: Any) -> dict[str, Any]:
    return {"step": at, "time": written(at), "event": name, **details}


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder: Path, *overrides: str, status: str = "finished", shift: float = 0.0) -> Path:
    """A run of 40 steps with two starts, two evaluations and a skipped update; its losses are shifted."""
    reports = [training_report(step, loss=4.0 + shift + 4.0 / step) for step in range(2, 41, 2)]
    reports.insert(10, evaluation_report(20, 4.5 + shift))
    reports.append(evaluation_report(40, 4.2 + shift))
    write_lines(folder / "logs" / "metrics.jsonl", reports)
    events = [
        event("start", 0, number=1),
        event("phase", 0, global_batch_size=2, weights={"dummy": 1}),
        event("skip", 7, reason="loss or gradient is not finite", in_a_row=1),
        event("checkpoint", 20, kind="interval", path="runs/a/checkpoints/step_20_ckp"),
        event("restart", 20, number=2, previous_status="killed", previous_reason=""),
        event("end", 40, status="finished", reason="40 of 40 steps are done"),
    ]
    write_lines(folder / "logs" / "events.jsonl", events)
    (folder / "config.yaml").write_text(dump_config(load_train_config([*TINY, *overrides])))
    values = {"status": status, "step": 40, "reason": "40 of 40 steps are done", "starts": 2}
    values |= {"starts_without_progress": 0, "started_at_step": 20, "updated": "2026-11-20T10:00:40+00:00"}
    (folder / "run_status.json").write_text(json.dumps(values))
    starts = [
        {"time": written(second), "step": second, "command": "pretrain train", "packages": {"torch": torch}}
        for second, torch in ((0, "2.12"), (20, "2.13"))
    ]
    (folder / "logs" / "environment.json").write_text(json.dumps(starts))
    return folder
