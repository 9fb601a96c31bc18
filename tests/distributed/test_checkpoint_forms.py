"""Unsharded checkpoints and weights from elsewhere, written and read by several processes in several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_runs import losses_of, train_runs

from pretraining.checkpoint.reader import open_tensors, read_tensor
from pretraining.checkpoint.start_point import find_newest
from pretraining.tools.command_settings import ExportConfig
from pretraining.tools.export import export
from pretraining.tools.verify import faults_of

pytestmark = pytest.mark.thorough

# A global batch and matrices that three processes do not divide evenly.
COMMON = ["global_batch_size=6", "batch_size=2", "num_steps=8", "tie_word_embeddings=true"]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    found = find_newest(path)
    source = open_tensors(found.path, found.manifest.files)
    return {name: read_tensor(source, name) for name in source.chunks}


def test_both_forms_resume_in_any_layout_and_hold_the_same_tensors(data_path: Path, tmp_path: Path) -> None:
    stages = [(2, "ddp", "full", 3), (4, "hsdp", "full", 2), (3, "fsdp", "sharded", 3)]
    train_runs(1, data_path, [[*COMMON, f"ckpt_save_path={tmp_path / 'whole'}"]])
    for number, (processes, strategy, form, steps) in enumerate(stages):
        stage = [*COMMON, f"sharding_strategy={strategy}", f"ckpt_format={form}", f"run_steps={steps}"]
        stage += ["hsdp_group_size=2"] if strategy == "hsdp" else []
        # The same steps in the other form, from the same checkpoint: what is saved does not depend on the form.
        other = "sharded" if form == "full" else "full"
        twin = [*stage, f"ckpt_format={other}", f"ckpt_save_path={tmp_path / f'twin{number}'}"]
        twin += [f"ckpt_load_path={tmp_path / 'moved'}"] if number else []
        train_runs(processes, data_path, [twin, [*stage, f"ckpt_save_path={tmp_path / 'moved'}"]])
        moved, apart = tensors_of(tmp_path / "moved"), tensors_of(tmp_path / f"twin{number}")
        assert moved.keys() == apart.keys()
        assert all(torch.equal(moved[name], apart[name]) for name in moved), (processes, strategy)
        assert faults_of(find_newest(tmp_path / "moved").path) == []
    assert losses_of(tmp_path / "moved") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-4)


def test_a_hugging_face_folder_starts_the_same_run_in_any_layout(data_path: Path, tmp_path: Path) -> None:
    train_runs(1, data_path, [[*COMMON, "run_steps=2", f"ckpt_save_path={tmp_path / 'old'}"]])
    export(ExportConfig(str(tmp_path / "old"), str(tmp_path / "hf"), max_shard_size="10KB"))
    load = [*COMMON, f"ckpt_load_path={tmp_path / 'hf'}", "run_steps=3"]
    layouts = {1: ["fsdp"], 3: ["ddp", "fsdp"]}
    losses: dict[str, list[float]] = {}
    for processes, strategies in layouts.items():
        runs = {strategy: tmp_path / f"{processes}{strategy}" for strategy in strategies}
        several = [[*load, f"sharding_strategy={name}", f"ckpt_save_path={run}"] for name, run in runs.items()]
        train_runs(processes, data_path, several)
        losses |= {run.name: losses_of(run) for run in runs.values()}
    for name, found in losses.items():
        assert found == pytest.approx(losses["1fsdp"], rel=1e-4), name
    assert len(losses["1fsdp"]) == 3 and losses["1fsdp"][0] < losses_of(tmp_path / "old")[0]

    # New rows of a larger vocabulary have the same bits in any layout.
    grown = [*load, "vocab_size=70", "learning_rate=0", "num_steps=1"]
    for processes in layouts:
        train_runs(processes, data_path, [[*grown, f"ckpt_save_path={tmp_path / f'grown{processes}'}"]])
    one, three = tensors_of(tmp_path / "grown1"), tensors_of(tmp_path / "grown3")
    name = "model.embed_tokens.weight"
    assert one[name].shape[0] == 70 and torch.equal(one[name], three[name])
