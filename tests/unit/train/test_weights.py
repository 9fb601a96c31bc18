"""Whole runs that start from weights, with the same model or a changed one, and runs in both forms of checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import first_quick
from training_runs import TINY, losses_of, metrics_of
from unit.train.whole_runs import (
    checkpoint,
    equal,
    manifest_of,
    refusal,
    start,
    started_at,
    tensors_of,
    write_tokenizer,
)

from pretraining.checkpoint.manifest import FULL_FILES
from pretraining.cli import main
from pretraining.config.read import load_train_config
from pretraining.config.recipe_files import load_config
from pretraining.config.variants import resolve_shape
from pretraining.data.tokenizer import load_tokenizer
from pretraining.tools.verify import faults_of

# The dimensions of TINY, for runs that adopt those of their start point.
MODEL = {"model_variant", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"} | {
    *("num_key_value_heads", "vocab_size")
}
DIMENSIONLESS = [flag for flag in TINY if flag.partition("=")[0] not in MODEL]

KINDS = {"tied": ["tie_word_embeddings=true"], "plain": [], "scaled": ["rope_theta=5e5", "rope_scaling=8,1,4,16"]}


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


def test_a_run_from_imported_weights_begins_with_them_and_at_the_first_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def samples(*flags: str) -> list[int]:
        capsys.readouterr()
        main(["inspect", *flags, "use_dummy_dataset=true", "step=1", "--json"])
        return sorted(json.loads(line)["sample_id"] for line in capsys.readouterr().out.splitlines())

    start(tmp_path / "run", "num_steps=2")
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'hf'}", "--dtype=float32"])
    main(["import", str(tmp_path / "hf"), f"--ckpt_save_path={tmp_path / 'imported'}"])
    assert samples(f"ckpt_load_path={tmp_path / 'imported'}", "seq_length=32", "batch_size=2") == [0, 1]
    start(tmp_path / "imported", "num_steps=1", "learning_rate=0", model=DIMENSIONLESS)
    before, after = tensors_of(tmp_path / "run"), tensors_of(tmp_path / "imported")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name.startswith("model."))
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
    assert (iteration["best_loss_name"], iteration["best_loss"]) == ("loss", min(losses_of(full)))  # of all starts


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


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STILL = ["learning_rate=0", "num_steps=1", "seq_length=16"]
"""Settings of runs whose checkpoint of step 1 holds the initial weights."""
OPEN = [flag for flag in TINY if not flag.startswith("vocab_size")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("weights") / "run"
    start(run, "num_steps=2")
    return run


def load(path: Path) -> list[str]:
    return [f"ckpt_load_path={path}", "weights_only=true", *STILL]


@pytest.mark.parametrize("form", ["run", "hf"])
def test_new_rows_of_a_larger_vocabulary_are_the_mean_of_the_old_ones(
    form: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = weights
    if form == "hf":
        source = tmp_path / "hf"
        main(["export", str(weights), f"--output_path={source}", "--dtype=float32"])
    start(tmp_path / "new", *load(source), "vocab_size=70", model=OPEN)
    printed = "".join(capsys.readouterr())
    assert "vocab_size  70 in place of 64, that of the weights in" in printed
    assert "each new row of embedding and head is the mean of the 64 rows" in printed
    before, after = tensors_of(weights), tensors_of(tmp_path / "new")
    for name in (EMBEDDING, HEAD):
        assert after[name].shape == (70, 32) and torch.equal(after[name][:64], before[name])
        mean = before[name].double().mean(0).float()
        assert torch.equal(after[name][64:], mean.expand(6, 32))
    for name in before.keys() - {EMBEDDING, HEAD}:
        assert name.startswith("optimizer.") or torch.equal(after[name], before[name]), name
    # The run has its own vocabulary from now on: the same command resumes it, another size does not.
    start(tmp_path / "new", *load(source), "vocab_size=70", "num_steps=2", model=OPEN)
    assert manifest_of(tmp_path / "new", 2)["model"]["vocab_size"] == 70
    error = refusal(tmp_path / "new", *load(source), "vocab_size=72", "num_steps=3", model=OPEN)
    assert "vocab_size: 70 in the checkpoint, 72 in this run" in str(error)


def test_a_smaller_vocabulary_needs_a_tokenizer_without_tokens_in_the_rows_that_go(tmp_path: Path) -> None:
    entries = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = f"tokenizer_path={tmp_path / 'tokenizer'}"
    start(tmp_path / "old", f"vocab_size={entries + 8}", "num_steps=1", model=OPEN)
    for flags, rows in (([], entries), ([tokenizer], entries - 1)):
        error = refusal(tmp_path / "new", *load(tmp_path / "old"), *flags, f"vocab_size={rows}", model=OPEN)
        assert f"--vocab_size={rows} drops {entries + 8 - rows} rows" in str(error)
        assert not (tmp_path / "new").exists()
    start(tmp_path / "new", *load(tmp_path / "old"), tokenizer, f"vocab_size={entries}", model=OPEN)
    before, after = tensors_of(tmp_path / "old"), tensors_of(tmp_path / "new")
    for name in (EMBEDDING, HEAD):
        assert torch.equal(after[name], before[name][:entries])


def test_weights_are_trained_with_another_rotary_embedding_and_a_run_keeps_its_own(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["rope_theta=5e5", "rope_scaling=8,1,4,16"]
    start(tmp_path / "new", *load(weights), *flags)
    printed = "".join(capsys.readouterr())
    assert "rope_theta  500000.0 in place of 10000.0, that of the weights in" in printed
    assert "rope_scaling 8.0,1.0,4.0,16.0 in place of none, that of the weights in" in printed
    assert manifest_of(tmp_path / "new", 1)["model"]["rope_theta"] == 5e5
    assert torch.equal(tensors_of(tmp_path / "new")[EMBEDDING], tensors_of(weights)[EMBEDDING])
    start(tmp_path / "new", *load(weights), *flags, "num_steps=2")
    error = refusal(tmp_path / "new", *load(weights), "num_steps=3")
    assert "rope_theta: 500000.0 in the checkpoint, 10000.0 in this run" in str(error)


def test_a_tokenizer_may_have_an_added_token_that_the_weights_have_no_row_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As that of Llama 2 with a padding token: 32,001 entries, 32,000 rows."""
    rows = write_tokenizer(tmp_path / "tokenizer")
    library = load_tokenizer(tmp_path / "tokenizer").library
    assert library.add_special_tokens(["<pad>"]) == library.add_tokens(["<extra>"]) == 1
    library.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token": "<pad>"}))
    flags = [f"tokenizer_path={tmp_path / 'tokenizer'}", f"vocab_size={rows}", "num_steps=1"]
    start(tmp_path / "run", *flags, "sample_prompt=left", "sample_tokens=2", model=OPEN)
    main(["export", str(tmp_path / "run"), f"--output_path={tmp_path / 'hf'}"])
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["vocab_size"] == rows and (exported["pad_token_id"] or 0) < rows
    main(["sample", str(tmp_path / "hf"), "--prompt=left", "--max_new_tokens=2"])
    # The token counts where it occurs, and a tokenizer of another model does not fit.
    error = refusal(tmp_path / "other", *flags, "sample_prompt=<extra>", "sample_tokens=2", model=OPEN)
    assert f"--sample_prompt gives token '<extra>' ({rows + 1}), and the model has {rows} rows" in str(error)
    error = refusal(tmp_path / "other", *flags, f"vocab_size={rows - 8}", "sample_tokens=2", model=OPEN)
    assert f"has {rows + 2} entries, but the model has {rows - 8}" in str(error)
    assert checkpoint(tmp_path / "run", 1).exists()
