"""Whole runs in this process that start from weights, write full checkpoints, or resume from other forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import first_quick
from training_runs import TINY, losses_of, metrics_of
from unit.train.whole_runs import checkpoint, equal, refusal, start, started_at, tensors_of

from pretraining.checkpoint.forms import read_manifest
from pretraining.checkpoint.manifest import FULL_FILES
from pretraining.cli import main
from pretraining.config.command_line import load_train_config
from pretraining.config.recipes import load_config
from pretraining.config.variants import resolve_shape
from pretraining.tools.verify import faults_of

# The dimensions of TINY, for runs that adopt those of their start point.
MODEL = {"model_variant", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"} | {
    *("num_key_value_heads", "vocab_size")
}
DIMENSIONLESS = [flag for flag in TINY if flag.partition("=")[0] not in MODEL]

KINDS = {"tied": ["tie_word_embeddings=true"], "plain": [], "scaled": ["rope_theta=5e5", "rope_scaling=8,1,4,16"]}


@pytest.mark.parametrize("kind", first_quick(*KINDS))
def test_exported_and_imported_weights_have_the_same_evaluation_loss(
    tmp_path: Path, kind: str, data_path: Path
) -> None:
    run, hf = tmp_path / "run", tmp_path / "hf"
    held_out = [f"data_path={data_path}", "held_out_fraction=0.2", "eval_batches=2", "sep_token=0"]
    start(run, *KINDS[kind], *held_out)
    main(["export", str(run), f"--output_path={hf}", "--dtype=float32", "--max_shard_size=20KB"])
    main(["import", str(hf), f"--ckpt_save_path={tmp_path / 'imported'}"])
    trained = read_manifest(checkpoint(run, 4))
    # With a learning rate of 0, the evaluation after a step is that of the initial weights.
    still = [*held_out, "learning_rate=0", "num_steps=1"]
    start(tmp_path / "imported", *still, model=DIMENSIONLESS)
    start(tmp_path / "direct", f"ckpt_load_path={hf}", *still, model=DIMENSIONLESS)
    start(tmp_path / "alone", f"ckpt_load_path={run}", "weights_only=true", *still, model=DIMENSIONLESS)
    for name in ("imported", "direct", "alone"):
        manifest = read_manifest(checkpoint(tmp_path / name, 1))
        assert manifest.evaluation_loss == trained.evaluation_loss and started_at(tmp_path / name) == 0, name
        positions = {"max_position_embeddings": manifest.model["max_position_embeddings"]}
        assert manifest.model == trained.model | positions
    assert faults_of(checkpoint(tmp_path / "imported", 1)) == []


def test_a_run_from_weights_starts_at_step_0_and_restarts_as_any_other(tmp_path: Path) -> None:
    start(tmp_path / "old", "num_steps=3", "global_batch_size=3")
    load = [f"ckpt_load_path={tmp_path / 'old'}", "weights_only=true", "seq_length=16", "seed=5", "warmup_steps=1"]
    start(tmp_path / "new", *load, "run_steps=2")
    lines = metrics_of(tmp_path / "new")
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["tokens_seen"] == 2 * 16
    assert lines[0]["learning_rate"] == pytest.approx(5e-4)
    steps = [value for name, value in tensors_of(tmp_path / "new").items() if "optimizer.step" in name]
    assert steps and all(value == 2 for value in steps)
    start(tmp_path / "new", *load)
    start(tmp_path / "whole", *load)
    assert started_at(tmp_path / "new") == 2 and losses_of(tmp_path / "whole") == losses_of(tmp_path / "new")


def test_without_dimensions_a_run_takes_those_of_its_checkpoint_and_7b_without_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, "run_steps=2", "rms_norm_eps=1e-3")
    start(run, model=DIMENSIONLESS)
    assert len(losses_of(run)) == 4
    tiny = resolve_shape(load_train_config([*TINY, "data_path=d"]).model)
    assert resolve_shape(load_config(run / "config.yaml").model) == replace(tiny, rms_norm_eps=1e-3)
    error = refusal(run, "hidden_size=64", model=DIMENSIONLESS)
    assert error.path == checkpoint(run, 4) and "hidden_size: 32 in the checkpoint, 64 in this run" in str(error)
    # The vocabulary is that of the checkpoint, or of 7b without one.
    for folder, vocabulary in ((run, 64), (tmp_path / "none", 32000)):
        assert (
            "sep_token"
            in refusal(folder, f"sep_token={vocabulary}", "ignore_memory=true", model=DIMENSIONLESS).settings
        )


def test_inspect_begins_at_the_first_sample_of_a_run_from_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def samples(*flags: str) -> list[int]:
        capsys.readouterr()
        main(["inspect", *flags, "use_dummy_dataset=true", "step=1", "--json"])
        return sorted(json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines())

    start(tmp_path / "run", "num_steps=2")
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'hf'}"])
    main(["import", str(tmp_path / "hf"), f"--ckpt_save_path={tmp_path / 'imported'}"])
    assert samples(f"ckpt_load_path={tmp_path / 'imported'}", "seq_length=32", "batch_size=2") == [0, 1]
    new = [f"ckpt_load_path={tmp_path / 'run'}", f"ckpt_save_path={tmp_path / 'new'}", "seq_length=16", "batch_size=3"]
    assert samples("weights_only=true", *new) == [0, 1, 2]
    start(tmp_path / "new", "num_steps=2")
    with pytest.raises(SystemExit):  # the run resumes from its own checkpoint
        samples("weights_only=true", *new)


@pytest.mark.parametrize("kind", first_quick(*KINDS))
def test_either_form_resumes_the_other_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole, full, moved, export = (tmp_path / name for name in ("whole", "full", "moved", "export"))
    start(whole, *KINDS[kind])
    start(full, *KINDS[kind], "ckpt_format=full", "run_steps=2", "checkpoint_interval=1")
    assert {path.name for path in checkpoint(full, 2).iterdir()} == {*FULL_FILES, "manifest.json"}
    assert faults_of(checkpoint(full, 2)) == []
    start(full, *KINDS[kind], "run_steps=1")
    start(full, *KINDS[kind], "ckpt_format=full")
    # An export of the shards, and the four files of it alone.
    main(["export", str(checkpoint(full, 3)), f"--output_path={export}", "--format=full"])
    (export / "manifest.json").unlink()
    start(moved, *KINDS[kind], f"ckpt_load_path={export}")
    assert equal(full, whole) and equal(moved, whole)
    assert losses_of(full) == losses_of(whole) and losses_of(moved) == losses_of(full)[3:]
    iteration: dict[str, Any] = torch.load(checkpoint(full, 4) / "iter_state_dict.pt", weights_only=True)
    assert (iteration["segment"], iteration["segment_start"], iteration["segment_end"]) == (0, 0, 8)  # samples


def test_a_llama_of_another_kind_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    hf, load = tmp_path / "hf", f"ckpt_load_path={tmp_path / 'hf'}"
    start(tmp_path / "run", "num_steps=1")
    main(["export", str(tmp_path / "run"), f"--output_path={hf}"])
    assert "hidden_size: 32 in the checkpoint, 64 in this run" in str(refusal(tmp_path / "new", load, "hidden_size=64"))
    config = (hf / "config.json").read_text()
    (hf / "config.json").write_text(json.dumps(json.loads(config) | {"attention_dropout": 0.1}))
    assert "attention_dropout is 0.1" in str(refusal(tmp_path / "new", load))
    (hf / "config.json").write_text(config)
    (hf / "model.safetensors").unlink()
    assert refusal(tmp_path / "new", load).settings == ("ckpt_load_path",)
    assert not (tmp_path / "new" / "checkpoints").exists()
