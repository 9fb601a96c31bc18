"""Tokenizers of weights, data and --tokenizer_path are compared at a new run's start and with --eval_only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from training_runs import TINY
from unit.train.whole_runs import refusal, start

from pretraining.cli import main
from pretraining.config.recipes import load_config
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import ConfigError, DataError
from pretraining.files import with_checksum
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.prepare import prepare

MODEL = [*(flag for flag in TINY if not flag.startswith("vocab_size")), "sample_tokens=2"]
COMMON = ["logical_shards=8", "eval_batches=1", "run_steps=1"]
TEXTS = [f"document {n} of some text, " * (n % 9 + 3) for n in range(100)]
OTHER_TEXTS = ["def other(words):\n    return words\n"] * 20


def prepared(root: Path, tokenizer: Path, name: str = "web") -> Path:
    (root.parent / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(PrepareConfig((str(root.parent / f"{name}.jsonl"),), output_path=str(root), tokenizer_path=str(tokenizer)))
    return root


def tokenizer_at(folder: Path, texts: list[str] = TEXTS, entries: int = 300) -> Path:
    folder.mkdir()
    train_tokenizer(texts, entries).save(folder)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tokenizers, data prepared with each, and weights of a run on the first with its tokenizer."""
    folder = tmp_path_factory.mktemp("places")
    found = {"right": tokenizer_at(folder / "right"), "wrong": tokenizer_at(folder / "wrong", OTHER_TEXTS)}
    for name in ("right", "wrong"):
        found[f"{name}_data"] = prepared(folder / f"{name}_data", found[name])
    start(folder / "run", f"data_path={found['right_data']}", *COMMON, "vocab_size=384", model=MODEL)
    main(["export", f"ckpt_load_path={folder / 'run'}", f"output_path={folder / 'weights'}", "dtype=float32"])
    return {**found, "run": folder / "run", "weights": folder / "weights"}


@pytest.fixture
def places(shared: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The same, and the folder of a new run; tests must not change the others."""
    return {**shared, "new": tmp_path / "new"}


def test_weights_and_data_of_other_tokenizers_are_refused_until_they_are_accepted(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    new = places["new"]
    for weights, own in (("weights", "weights"), ("run", "right_data")):  # a Hugging Face folder; a run
        load = [f"ckpt_load_path={places[weights]}", "weights_only=true", *COMMON]
        error = refusal(new, *load, f"data_path={places['wrong_data']}", model=MODEL)
        assert "tokenizers differ, that of the weights in " in str(error) and "tokens differ, the first is" in str(
            error
        )
        assert f"--tokenizer_path={places[own]}" in str(error)
        assert "accept_tokenizer" in error.settings
        start(new, *load, f"data_path={places['right_data']}", "dry_run=true", model=MODEL)
    accepted = [*load, f"data_path={places['wrong_data']}", "accept_tokenizer=true"]
    start(new, *accepted, model=MODEL)
    assert "accepted: tokenizers differ" in "".join(capsys.readouterr())
    start(new, f"data_path={places['wrong_data']}", *COMMON, model=MODEL)  # a resumed run is not asked
    assert load_config(new / "config.yaml").data.accept_tokenizer
    assert "tokenizers differ" not in "".join(capsys.readouterr())
    main(["train", *MODEL, f"ckpt_save_path={new}", f"eval_datasets={places['wrong_data'] / 'web'}", "eval_only=true"])


def test_a_tokenizer_that_is_not_that_of_the_data_is_refused(places: dict[str, Path]) -> None:
    flags = [f"data_path={places['right_data']}", *COMMON, "vocab_size=384"]
    error = refusal(places["new"], *flags, f"tokenizer_path={places['wrong']}", model=MODEL)
    assert f"that of --tokenizer_path={places['wrong']} and that of prepare.json in" in str(error)
    assert "Drop the flag, or accept it: --accept_tokenizer=true" in str(error)
    start(places["new"], *flags, f"tokenizer_path={places['right']}", "dry_run=true", model=MODEL)
    missing = refusal(places["new"], *flags, f"tokenizer_path={places['new']}/tokenizer.json", model=MODEL)
    assert isinstance(missing, DataError)


def test_datasets_of_two_tokenizers_are_named(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("right", "wrong"):
        shutil.copytree(places[f"{name}_data"] / "web", tmp_path / "data" / name)
    flags = [f"data_path={tmp_path / 'data'}", *COMMON, "vocab_size=384"]
    error = refusal(places["new"], *flags, model=MODEL)
    assert all(f"that of prepare.json in {tmp_path / 'data' / name}" in str(error) for name in ("right", "wrong"))
    assert "tokenizers differ, " in str(error) and "accept_tokenizer" in error.settings
    start(places["new"], *flags, "accept_tokenizer=true", model=MODEL)
    assert "accepted: tokenizers differ, that of prepare.json in" in "".join(capsys.readouterr())
    assert load_config(places["new"] / "config.yaml").data.tokenizer_path is None


def test_evaluation_sets_count_at_a_start_and_in_an_evaluation(places: dict[str, Path]) -> None:
    sets = f"eval_datasets={places['wrong_data'] / 'web'}"
    error = refusal(places["new"], f"data_path={places['right_data']}", sets, *COMMON, model=MODEL)
    assert isinstance(error, ConfigError) and str(places["wrong_data"] / "web") in str(error)
    for weights in ("run", "weights"):
        alone = [f"ckpt_load_path={places[weights]}", "eval_only=true", "eval_batches=1", "mixed_precision=false"]
        with pytest.raises(SystemExit) as ending:
            main(["train", *alone, "seq_length=32", sets])
        assert "that of the weights in" in str(ending.value.__context__)
        main(["train", *alone, "seq_length=32", sets, "accept_tokenizer=true"])


def test_runs_of_earlier_versions_with_another_tokenizer_go_on(places: dict[str, Path]) -> None:
    flags = [f"data_path={places['right_data']}", *COMMON, "vocab_size=384", f"tokenizer_path={places['wrong']}"]
    start(places["new"], *flags, "accept_tokenizer=true", model=MODEL)
    (manifest,) = places["new"].glob("checkpoints/*/manifest.json")
    document = json.loads(manifest.read_text())
    del document["checksum"]
    document["config"] = document["config"].replace("  accept_tokenizer: true\n", "")
    manifest.write_text(json.dumps(with_checksum(document)))
    start(places["new"], *flags, model=MODEL)


@pytest.mark.parametrize("has_sentencepiece", [False, True])
def test_a_tokenizer_that_is_unknown_is_no_difference(
    places: dict[str, Path], has_sentencepiece: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = shutil.copytree(
        places["weights"], places["new"].with_name("weights"), ignore=shutil.ignore_patterns("tokenizer*")
    )
    if has_sentencepiece:
        (weights / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    load = [f"ckpt_load_path={weights}", *COMMON, "dry_run=true"]
    start(places["new"], *load, f"data_path={places['wrong_data']}", model=MODEL)
    assert "differ" not in "".join(capsys.readouterr())


def test_data_without_a_record_is_read_with_the_tokenizer_of_the_weights(places: dict[str, Path]) -> None:
    shutil.copytree(places["right_data"], places["new"].parent / "foreign")
    foreign = places["new"].parent / "foreign"
    for name in ("web/prepare.json", "tokenizer.json"):
        (foreign / name).unlink()
    flags = [f"ckpt_load_path={places['weights']}", f"data_path={foreign}", *COMMON]
    error = refusal(places["new"], *flags, f"tokenizer_path={places['wrong']}", model=MODEL)
    assert f"that of --tokenizer_path={places['wrong']} and that of the weights in" in str(error)
    start(places["new"], *flags, model=MODEL)
    assert load_config(places["new"] / "config.yaml").data.tokenizer_path == str(places["weights"])


def test_a_larger_vocabulary_that_extends_that_of_the_weights_is_trained_on(places: dict[str, Path]) -> None:
    larger = tokenizer_at(places["new"].parent / "larger", entries=340)
    data = prepared(places["new"].parent / "larger_data", larger)
    load = [f"ckpt_load_path={places['weights']}", "weights_only=true", f"data_path={data}", *COMMON, "vocab_size=512"]
    start(places["new"], *load, model=MODEL)
