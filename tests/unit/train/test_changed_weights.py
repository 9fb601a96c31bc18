"""Whole runs in this process that start from weights and change their vocabulary, rotary embedding or tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_runs import TINY
from unit.train.whole_runs import checkpoint, manifest_of, refusal, start, tensors_of, write_tokenizer

from pretraining.cli import main
from pretraining.data.tokenizer import load_tokenizer

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


def test_weights_go_on_with_another_rotary_embedding_and_a_run_keeps_its_own(
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
