"""A new run takes the beginning token and the tokenizer of its prepared data; a resumed run keeps its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from training_runs import TINY
from unit.train.whole_runs import manifest_of, refusal, start

from pretraining.checkpoint.start_point import find_start
from pretraining.cli import main
from pretraining.config.recipes import load_config
from pretraining.config.training import TrainConfig
from pretraining.data.tokenizer import load_tokenizer, train_tokenizer
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.prepare import prepare
from pretraining.train import resolve as resolve_module

MODEL = [flag for flag in TINY if not flag.startswith("vocab_size")]
COMMON = ["logical_shards=8", "held_out_fraction=0.2", "eval_batches=1"]
TEXTS = [f"document {n} of some text, " * (n % 9 + 3) for n in range(200)]


def write_tokenizer(folder: Path, text: str = "some words", begin: int | None = None) -> None:
    """Write a tokenizer of 300 entries or fewer that may put a token before every text."""
    folder.mkdir(exist_ok=True)
    tokenizer = train_tokenizer([text, *TEXTS], 300)
    if begin is not None:
        name = tokenizer.library.id_to_token(begin)
        tokenizer.library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{name} $A", special_tokens=[(name, begin)]
        )
    (folder / "tokenizer.json").write_text(tokenizer.library.to_str())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A prepared dataset whose tokenizer puts token 5 before every text, and ends it with 0."""
    write_tokenizer(tmp_path / "given", begin=5)
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(
        PrepareConfig(
            input_path=(str(tmp_path / "web.jsonl"),),
            output_path=str(tmp_path / "data"),
            tokenizer_path=str(tmp_path / "given"),
        )
    )
    return tmp_path / "data"


def without_record(data: Path, *names: str) -> None:
    """Make prepare.json what older versions wrote: without these records of the tokenizer."""
    path = data / "web/prepare.json"
    content = json.loads(path.read_text())
    for name in names:
        del content["tokenizer"][name]
    path.write_text(json.dumps(content))


def settings_of(run: Path) -> TrainConfig:
    return load_config(run / "config.yaml")


def test_a_new_run_takes_begin_token_tokenizer_and_vocabulary_of_its_data_and_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert json.loads((data / "web/prepare.json").read_text())["tokenizer"]["begin_of_text"] == 5
    start(run, f"data_path={data}", *COMMON, "run_steps=2", model=MODEL)
    printed = "".join(capsys.readouterr())
    for line in (
        f"sep_token   0, the end_of_text of prepare.json in {data / 'web'}",
        f"bos_token   5, the begin_of_text of prepare.json in {data / 'web'}",
        f"tokenizer   {data}, that of prepare.json in {data / 'web'}",
    ):
        assert line in printed
    entries = load_tokenizer(data).vocab_size
    assert f"vocab_size  384, for the {entries} entries of {data}" in printed and entries < 384
    settings = settings_of(run)
    assert (settings.data.bos_token, settings.data.tokenizer_path, settings.model.vocab_size) == (5, str(data), 384)
    assert manifest_of(run, 2)["data"]["bos_token"] == 5


def test_a_resumed_run_keeps_what_its_checkpoint_recorded(data: Path, tmp_path: Path) -> None:
    flags = [f"data_path={data}", *COMMON]
    start(tmp_path / "run", *flags, "run_steps=2", model=MODEL)
    prepared = (data / "web/prepare.json").read_text()
    (data / "web/prepare.json").unlink()
    start(tmp_path / "run", *flags, "run_steps=1", model=MODEL)
    settings = settings_of(tmp_path / "run")
    assert (settings.data.bos_token, settings.data.tokenizer_path) == (5, str(data))
    # and one that began without, as those of earlier versions, stays without
    start(tmp_path / "old", *flags, "run_steps=2", model=MODEL)
    assert settings_of(tmp_path / "old").data.bos_token is None
    (data / "web/prepare.json").write_text(prepared)
    start(tmp_path / "old", *flags, "run_steps=1", model=MODEL)
    settings = settings_of(tmp_path / "old")
    assert (settings.data.bos_token, settings.data.tokenizer_path, settings.model.vocab_size) == (None, None, None)


def test_the_first_rank_tells_all_whether_the_tokenizer_of_a_resumed_run_is_still_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "run", f"data_path={data}", *COMMON, "run_steps=2", model=MODEL)
    config, here, elsewhere = settings_of(tmp_path / "run"), data, tmp_path / "on another node"
    (data / "web/prepare.json").unlink()
    here.rename(elsewhere)

    def ask_rank_zero(function: Callable[[], object]) -> object:
        elsewhere.rename(here)
        found = function()
        here.rename(elsewhere)
        return found

    monkeypatch.setattr("pretraining.distributed.processes.on_rank_zero", ask_rank_zero)
    without = replace(config, data=replace(config.data, tokenizer_path=None, index_path="/local"))
    resolved, _ = resolve_module.resolve(without, lambda: find_start(without.checkpoint))
    assert resolved.data.tokenizer_path == str(data) and resolved.data.index_path == "/local"


def test_a_run_in_a_folder_with_a_timestamp_is_found_again(data: Path, tmp_path: Path) -> None:
    (data / "web/prepare.json").rename(data / "kept.json")
    flags = [f"data_path={data}", *COMMON, "run_steps=2", "sep_token=0"]
    start(tmp_path / "run.{timestamp}", *flags, model=MODEL)
    (data / "kept.json").rename(data / "web/prepare.json")
    start(tmp_path / "run.{timestamp}", *flags, model=MODEL)
    assert len(list(tmp_path.glob("run.*"))) == 1


def test_a_prepare_json_of_an_older_version_hands_on_no_begin_token(data: Path, tmp_path: Path) -> None:
    without_record(data, "begin_of_text")
    start(tmp_path / "run", f"data_path={data}", *COMMON, model=MODEL)
    assert settings_of(tmp_path / "run").data.bos_token is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: write_tokenizer(data, "other text"), "is not the one that encoded"),
        (lambda data: (data / "tokenizer.json").write_text("{"), "cannot read a tokenizer here"),
        (lambda data: (data / "tokenizer.json").unlink(), ""),
    ],
)
def test_another_or_a_damaged_tokenizer_beside_the_data_is_not_taken(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, why: str
) -> None:
    change(data)  # type: ignore[operator]
    start(tmp_path / "run", f"data_path={data}", *COMMON, "vocab_size=384")
    assert settings_of(tmp_path / "run").data.tokenizer_path is None
    printed = "".join(capsys.readouterr())
    assert ("no tokenizer is used: " in printed) == bool(why) and why in printed


def test_a_tokenizer_with_more_entries_than_the_given_vocabulary_is_not_taken(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = load_tokenizer(data).vocab_size
    start(tmp_path / "run", f"data_path={data}", *COMMON, f"vocab_size={entries - 1}", "dry_run=true")
    printed = "".join(capsys.readouterr())
    assert f"has {entries} entries, and the model {entries - 1}" in printed


def test_datasets_of_two_tokenizers_are_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = json.loads((data / "web/prepare.json").read_text())
    other["tokenizer"]["sha256"] = "1234"
    (data / "two").mkdir()
    (data / "two/prepare.json").write_text(json.dumps(other))
    (data / "two/part.arrow").write_bytes(next((data / "web").glob("*.arrow")).read_bytes())
    flags = [f"data_path={data}", *COMMON, "vocab_size=384"]
    error = refusal(tmp_path / "run", *flags)
    (two, web) = (data / "two", data / "web")
    assert f"tokenizers differ, that of prepare.json in {web} and that of prepare.json in {two}: their hashes" in str(
        error
    )
    assert "accept_tokenizer" in error.settings
    start(tmp_path / "run", *flags, "accept_tokenizer=true")
    assert "accepted: tokenizers differ, that of prepare.json in" in "".join(capsys.readouterr())
    assert settings_of(tmp_path / "run").data.tokenizer_path is None


def test_text_at_evaluations_needs_a_tokenizer_given_or_beside_the_data(data: Path, tmp_path: Path) -> None:
    flags = [f"data_path={data}", *COMMON, "sample_at_evaluations=true", "dry_run=true"]
    start(tmp_path / "run", *flags, model=MODEL)
    (data / "web/prepare.json").unlink()
    error = refusal(tmp_path / "run", *flags, "vocab_size=384", model=MODEL)
    assert "tokenizer_path" in error.settings


def test_weights_that_expect_a_begin_token_and_data_without_one_are_a_warning(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"data_path={data}", *COMMON]
    start(tmp_path / "first", *flags, "run_steps=2", model=MODEL)
    main(["export", f"ckpt_load_path={tmp_path / 'first'}", f"output_path={tmp_path / 'exported'}", "dtype=float32"])
    for place in ("first", "exported"):
        capsys.readouterr()
        load = [f"ckpt_load_path={tmp_path / place}", "weights_only=true", "dry_run=true"]
        start(tmp_path / "second", *flags, *load, model=MODEL)
        assert "expect token" not in "".join(capsys.readouterr())
        without = json.loads((data / "web/prepare.json").read_text())
        without["tokenizer"].pop("begin_of_text")
        kept = (data / "web/prepare.json").read_text()
        (data / "web/prepare.json").write_text(json.dumps(without))
        start(tmp_path / "second", *flags, *load, model=MODEL)
        (data / "web/prepare.json").write_text(kept)
        printed = "".join(capsys.readouterr())
        assert "expect token 5 before every text" in printed and "--bos_token=5" in printed


def test_weights_beside_a_tokenizer_that_cannot_be_read_are_trained_on_with_a_warning(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_record(data, "begin_of_text")
    flags = [f"data_path={data}", *COMMON]
    start(tmp_path / "first", *flags, "run_steps=2", model=MODEL)
    main(["export", f"ckpt_load_path={tmp_path / 'first'}", f"output_path={tmp_path / 'exported'}", "dtype=float32"])
    (tmp_path / "exported/tokenizer.json").write_text("{")
    load = [f"ckpt_load_path={tmp_path / 'exported'}", "weights_only=true", "dry_run=true"]
    start(tmp_path / "second", *flags, *load, model=MODEL)
    assert "which tokenizer the weights expect is unknown" in "".join(capsys.readouterr())
