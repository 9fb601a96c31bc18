"""Small checkpoint for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from pretraining.checkpoint.branches import Branch, Branches
from pretraining.checkpoint.manifest import LOSS_STATE, RUN_STATE, FileEntry, Manifest
from pretraining.checkpoint.reader import load_tensors
from pretraining.checkpoint.run_folder import checkpoint_path, read_document
from pretraining.checkpoint.writer import plan_save, save_checkpoint
from pretraining.config.training import ModelConfig
from pretraining.config.variants import resolve_shape

FIRST = (Branch(1, 0, "first"),)
"""Branches of a run that was started once."""
SHAPE = resolve_shape(ModelConfig(model_variant="tiny"))


def manifest_of(
    step: int,
    files: Mapping[str, FileEntry] | None = None,
    kind: str = "interval",
    evaluation_loss: float | None = None,
    skipped: Sequence[Sequence[int]] = (),
) -> Manifest:
    data = {
        "next_sample": 12,
        "phases": [{"first_step": 0, "first_sample": 0, "global_batch_size": 4, "seq_length": 8, "weights": {"a": 1}}],
        "datasets": {"a": {}},
        "counts": {"a": [[8, 12]]},
        "skipped": [list(each) for each in skipped],
    }
    return Manifest(
        step=step,
        tokens_seen=step * 10,
        kind=kind,
        evaluation_loss=evaluation_loss,
        data=data,
        global_batch_size=4,
        model=asdict(SHAPE),
        files=files or {},
    )


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.a.weight": torch.full((3, 2), value),
        "lm_head.weight": torch.full((4,), value),
        "optimizer.step.lm_head.weight": torch.tensor(value),
    }


def save(
    run: Path,
    step: int,
    kind: str = "interval",
    evaluation_loss: float | None = None,
    skipped: Sequence[Sequence[int]] = (),
    branches: Branches = FIRST,
) -> Path:
    """Save a checkpoint whose tensors hold its step."""
    folder = checkpoint_path(run, step)
    folder = folder.with_name(folder.name + (".preempt" if kind == "preempt" else ""))
    manifest = manifest_of(step, kind=kind, evaluation_loss=evaluation_loss, skipped=skipped)
    state = {RUN_STATE: {"id": "a run", "branches": branches}, LOSS_STATE: {"value": evaluation_loss, "step": step}}
    manifest = replace(manifest, state=state)
    save_checkpoint(folder, plan_save(tensors(float(step))), manifest)
    return folder


def load(folder: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Load a checkpoint into tensors."""
    load_tensors(folder, read_document(folder).files, into)
