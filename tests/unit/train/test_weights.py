"""Whole runs in this process that begin with weights, write unsharded checkpoints, or go on from other forms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import TINY, losses_of, write_two_datasets

from pretraining.checkpoint.manifest import FULL_FILES, read_manifest
from pretraining.checkpoint.start_point import named_checkpoint, open_tensors
from pretraining.cli import main
from pretraining.config.command_line import load_train_config
from pretraining.config.recipes import load_config
from pretraining.config.variants import resolve_shape
from pretraining.tools.verify_checkpoints import faults_of

# The dimensions of TINY, for runs that take them from where they start.
MODEL = {"model_variant", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"} | {
    *("num_key_value_heads", "vocab_size")
}
DIMENSIONLESS = [flag for flag in TINY if flag.partition("=")[0] not in MODEL]

KINDS = {
    "plain": [],
    "tied": ["tie_word_embeddings=true"],
    "scaled": ["rope_theta=5e5", "rope_scaling=8,1,4,16"],
}


def start(run: Path, *flags: str, model: list[str] = TINY) -> None:
    names = {flag.partition("=")[0] for flag in flags}
    common = [*model, "num_steps=4", "use_dummy_dataset=true"]
    if "data_path" in names:
        common.pop()
    main(["train", *(flag for flag in common if flag.partition("=")[0] not in names), f"ckpt_save_path={run}", *flags])


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_tensors(named_checkpoint(str(path)))
    return {name: source.read(name).clone() for name in source.shapes()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_and_imported_weights_have_the_same_evaluation_loss(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_two_datasets(tmp_path / "data")
    held_out = [f"data_path={data}", "held_out_fraction=0.2", "eval_batches=2", "sep_token=0"]
    start(tmp_path / "run", *KINDS[kind], *held_out)
    main(
        [
            "export",
            str(tmp_path / "run"),
            f"--output_path={tmp_path / 'hf'}",
            "--dtype=float32",
            "--max_shard_size=20KB",
        ]
    )
    main(["import", str(tmp_path / "hf"), f"--ckpt_save_path={tmp_path / 'imported'}"])
    trained = read_manifest(tmp_path / "run/checkpoints/step_4_ckp").evaluation_loss
    # A learning rate of 0: what is evaluated after a step are the weights that it began with.
    still = [*held_out, "learning_rate=0", "num_steps=1"]
    capsys.readouterr()
    start(tmp_path / "imported", *still, model=DIMENSIONLESS)
    assert (
        f"start       at step 0 with the weights of {tmp_path}/imported/checkpoints/step_0_ckp"
        in capsys.readouterr().out
    )
    start(tmp_path / "direct", f"ckpt_load_path={tmp_path / 'hf'}", *still, model=DIMENSIONLESS)
    assert f"with the weights of {tmp_path}/hf" in capsys.readouterr().out
    start(tmp_path / "alone", f"ckpt_load_path={tmp_path / 'run'}", "weights_only=true", *still, model=DIMENSIONLESS)
    for run in ("imported", "direct", "alone"):
        manifest = read_manifest(tmp_path / run / "checkpoints" / "step_1_ckp")
        assert manifest.evaluation_loss == trained, run
        assert manifest.model == read_manifest(tmp_path / "run/checkpoints/step_4_ckp").model | {
            "max_position_embeddings": manifest.model["max_position_embeddings"]
        }
    assert faults_of(tmp_path / "imported/checkpoints/step_1_ckp") == []


def test_a_run_from_weights_alone_begins_anew_and_restarts_as_any_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "old", "num_steps=3", "global_batch_size=3")
    load = [f"ckpt_load_path={tmp_path / 'old'}", "weights_only=true", "seq_length=16", "seed=5", "warmup_steps=1"]
    start(tmp_path / "new", *load, "run_steps=2")
    lines = [json.loads(line) for line in (tmp_path / "new/logs/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and lines[0]["tokens_seen"] == 2 * 16
    assert lines[0]["learning_rate"] == pytest.approx(5e-4)
    weights = {name: value for name, value in tensors_of(tmp_path / "new").items() if "optimizer.step" in name}
    assert all(value == 2 for value in weights.values())
    capsys.readouterr()
    start(tmp_path / "new", *load)
    assert f"start       from {tmp_path}/new/checkpoints/step_2_ckp, step 2" in capsys.readouterr().out
    start(tmp_path / "whole", *load)
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "new")


def test_without_dimensions_a_run_takes_those_of_its_checkpoint_and_7b_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "run_steps=2", "rms_norm_eps=1e-3")
    start(tmp_path / "run", model=DIMENSIONLESS)
    out = capsys.readouterr().out
    assert len(losses_of(tmp_path / "run")) == 4 and " was " not in out
    written = load_config(tmp_path / "run/config.yaml")
    assert resolve_shape(written.model) == replace(
        resolve_shape(load_train_config([*TINY, "data_path=d"]).model), rms_norm_eps=1e-3
    )
    for flags, message in (
        (["hidden_size=64"], "hidden_size: 32 in the checkpoint, 64 in this run"),
        (["sep_token=64"], "--sep_token=64 is outside a vocabulary of 64"),
        ([f"ckpt_load_path={tmp_path}", f"ckpt_save_path={tmp_path / 'b'}"], "holds no complete checkpoint"),
    ):
        with pytest.raises(SystemExit):
            start(tmp_path / "run", *flags, model=DIMENSIONLESS)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):  # nothing to start from: 7b, whose vocabulary has 32000 rows
        start(tmp_path / "none", "sep_token=32000", model=DIMENSIONLESS)
    assert "--sep_token=32000 is outside a vocabulary of 32000" in capsys.readouterr().err


def test_inspect_begins_at_the_first_sample_of_a_run_from_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "num_steps=1")
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'hf'}"])
    main(["import", str(tmp_path / "hf"), f"--ckpt_save_path={tmp_path / 'new'}"])
    capsys.readouterr()
    common = ["seq_length=32", "use_dummy_dataset=true", "step=1", "--json"]
    main(["inspect", f"ckpt_save_path={tmp_path / 'new'}", *common])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["sample_id"] in (0, 1)
    main(["inspect", f"ckpt_load_path={tmp_path / 'new'}", *common])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["sample_id"] in (0, 1)


def test_inspect_shows_what_a_run_from_weights_alone_would_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "num_steps=2")
    paths = [f"ckpt_load_path={tmp_path / 'run'}", f"ckpt_save_path={tmp_path / 'new'}"]
    new = [*paths, "use_dummy_dataset=true", "seq_length=16", "batch_size=3", "step=1", "--json"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("weights_only: true\n")
    for weights_only in ("weights_only=true", f"recipe={recipe}"):
        capsys.readouterr()
        main(["inspect", weights_only, *new])
        shown = [json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines()]
        assert sorted(shown) == [0, 1, 2]
    start(tmp_path / "new", "num_steps=2")
    with pytest.raises(SystemExit):  # the run has begun, and goes on from its own checkpoint
        main(["inspect", "weights_only=true", *new])
    assert "seq_length was 32 and is 16" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_either_form_goes_on_bit_for_bit_from_the_other(tmp_path: Path, kind: str) -> None:
    start(tmp_path / "whole", *KINDS[kind])
    full, moved = tmp_path / "full", tmp_path / "moved"
    start(full, *KINDS[kind], "ckpt_format=full", "run_steps=2", "checkpoint_interval=1")
    assert {path.name for path in (full / "checkpoints/step_2_ckp").iterdir()} == {*FULL_FILES, "manifest.json"}
    assert faults_of(full / "checkpoints/step_2_ckp") == []
    start(full, *KINDS[kind], "run_steps=1")
    start(full, *KINDS[kind], "ckpt_format=full")
    # An export of the shards, and the four files of it alone.
    main(["export", str(full / "checkpoints/step_3_ckp"), f"--output_path={tmp_path / 'export'}", "--format=full"])
    (tmp_path / "export/manifest.json").unlink()
    start(moved, *KINDS[kind], f"ckpt_load_path={tmp_path / 'export'}")
    expected = tensors_of(tmp_path / "whole")
    assert same(tensors_of(full), expected) and same(tensors_of(moved), expected)
    assert losses_of(full) == losses_of(tmp_path / "whole") and losses_of(moved) == losses_of(full)[3:]
    iteration: dict[str, Any] = torch.load(full / "checkpoints/step_4_ckp/iter_state_dict.pt", weights_only=True)
    assert (iteration["segment"], iteration["segment_start"], iteration["segment_end"]) == (0, 0, 4)


def test_a_full_checkpoint_that_was_changed_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, "ckpt_format=full", "checkpoint_interval=1", "run_steps=2")
    model = tmp_path / "checkpoints/step_2_ckp/model_state_dict.pt"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    start(tmp_path, "ckpt_format=full")
    out = capsys.readouterr().out
    assert "model_state_dict.pt is damaged" in out and "passed over" in out and "step_1_ckp, step 1" in out


def test_where_a_full_checkpoint_cannot_be_written_the_run_ends_with_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pretraining.checkpoint.pt_files.write_full", refuse)
    with pytest.raises(SystemExit):
        start(tmp_path, "ckpt_format=full")
    error = capsys.readouterr().err
    assert "the file system is full" in error and "Traceback" not in error


def test_a_llama_of_another_kind_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", "num_steps=1")
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'hf'}"])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(SystemExit):
        start(tmp_path / "new", f"ckpt_load_path={tmp_path / 'hf'}")
    assert "attention_bias is True" in capsys.readouterr().err
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    (tmp_path / "hf/model.safetensors").unlink()
    with pytest.raises(SystemExit):
        start(tmp_path / "new", f"ckpt_load_path={tmp_path / 'hf'}")
    assert "has no weights" in capsys.readouterr().err
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'again'}"])
    with pytest.raises(SystemExit):
        start(tmp_path / "new", f"ckpt_load_path={tmp_path / 'again'}", "vocab_size=60")
    assert "vocab_size: 64 in the checkpoint, 60 in this run" in capsys.readouterr().err
    assert not (tmp_path / "new" / "checkpoints").exists()
