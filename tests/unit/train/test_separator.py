"""Without `sep_token`, a new run uses that of its prepared data, and a resumed run keeps its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from training_runs import TINY, write_two_datasets
from unit.train.whole_runs import refusal, start

from pretraining.api import Trainer
from pretraining.checkpoint.forms import read_manifest
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.cli import main
from pretraining.config.recipes import load_config
from pretraining.config.training import NO_TOKEN

COMMON = ["logical_shards=8"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two datasets; the first has a prepare.json."""
    write_two_datasets(tmp_path / "data")
    prepare(tmp_path / "data/first", 0)
    return tmp_path / "data"


def prepare(folder: Path, end_of_text: object) -> None:
    (folder / "prepare.json").write_text(json.dumps({"tokenizer": {"end_of_text": end_of_text}}))


def separator_of(run: Path) -> int | None:
    (*_, newest) = committed_checkpoints(run)
    separator = read_manifest(newest.path).data["sep_token"]
    assert separator == load_config(run / "config.yaml").data.sep_token
    assert separator is None or isinstance(separator, int)
    return separator


def test_a_new_run_takes_the_end_of_text_of_its_prepared_data_and_dry_run_and_inspect_show_the_same(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, flags = tmp_path / "run", [f"data_path={data}", *COMMON]
    start(run, *flags, "dry_run=true")
    shown = capsys.readouterr().out
    assert any(line.split()[:2] == ["sep_token", "0"] for line in shown.splitlines())
    spans = []
    for given in ([], ["sep_token=0"]):
        main(["inspect", *TINY, *flags, *given, f"ckpt_save_path={run}", "batch_size=2", "step=1", "json=true"])
        spans.append(capsys.readouterr().out)
    assert spans[0] == spans[1]
    start(run, *flags, "run_steps=2")
    assert separator_of(run) == 0
    (data / "first/prepare.json").unlink()  # the run has its own `sep_token` now
    start(run, *flags)
    assert separator_of(run) == 0


def documents_of(run: Path) -> object:
    """Return the token that ends the documents of a run."""
    (*_, newest) = committed_checkpoints(run)
    return read_manifest(newest.path).data["sep_token"]


@pytest.mark.parametrize("typed", ["sep_token=none", "eos_token=null", "sep_token=-1"])
def test_a_typed_none_is_no_token_and_stays_so_when_resumed_and_in_config_yaml(
    data: Path, tmp_path: Path, typed: str
) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    start(run, f"data_path={data}", *COMMON, typed, "run_steps=2")
    assert documents_of(run) is None
    start(run, f"data_path={data}", *COMMON, "run_steps=1")
    assert documents_of(run) is None
    main(["train", f"--recipe={run / 'config.yaml'}", f"ckpt_save_path={again}", "num_steps=1"])
    assert documents_of(again) is None
    (tmp_path / "own.yaml").write_text("sep_token: none\n")
    start(tmp_path / "recipe", f"--recipe={tmp_path / 'own.yaml'}", f"data_path={data}", *COMMON, "num_steps=1")
    assert documents_of(tmp_path / "recipe") is None


@pytest.mark.parametrize("written", ["sep_token:\n", "sep_token: null\n", 'sep_token: ""\n', ""])
def test_what_is_not_given_is_that_of_the_data(data: Path, tmp_path: Path, written: str) -> None:
    (tmp_path / "own.yaml").write_text(f"eval_batches: 1\n{written}")
    flags = [f"--recipe={tmp_path / 'own.yaml'}", f"data_path={data}", *COMMON, "num_steps=1"]
    start(tmp_path / "run", *flags)
    assert separator_of(tmp_path / "run") == 0
    start(tmp_path / "empty", *flags, "--sep_token=")  # such as of a variable that is not set
    assert separator_of(tmp_path / "empty") == 0


def test_none_in_python_means_none_where_it_is_given(data: Path, tmp_path: Path) -> None:
    flags = dict(flag.split("=") for flag in [*TINY, *COMMON])
    for given, expected in (({}, 0), ({"sep_token": None}, None), ({"sep_token": NO_TOKEN}, None)):
        run = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        settings = {**flags, "data_path": data, "num_steps": 1, "ckpt_save_path": run, **given}
        Trainer.from_recipe(**settings).train()
        assert documents_of(run) == expected


def test_flat_files_need_a_separator_whatever_none_says(tmp_path: Path) -> None:
    (tmp_path / "data/one").mkdir(parents=True)
    np.arange(90, dtype=np.uint16).tofile(tmp_path / "data/one/a.bin")
    flags = [f"data_path={tmp_path / 'data'}", "token_dtype=uint16", "sep_token=none", "vocab_size=128"]
    assert "--sep_token is needed" in str(refusal(tmp_path / "run", *flags))


def test_a_run_in_a_folder_with_a_timestamp_and_a_typed_none_is_found_again(data: Path, tmp_path: Path) -> None:
    for typed in (["sep_token=none"], ["sep_token=none"], []):
        start(tmp_path / "run.{timestamp}", f"data_path={data}", *COMMON, "run_steps=1", *typed)
    (run,) = tmp_path.glob("run.*")
    assert documents_of(run) is None


def test_a_run_without_a_separator_resumes_without(data: Path, tmp_path: Path) -> None:
    (data / "first/prepare.json").unlink()
    start(tmp_path / "run", f"data_path={data}", *COMMON, "run_steps=2")
    prepare(data / "first", 0)
    start(tmp_path / "run", f"data_path={data}", *COMMON)
    assert separator_of(tmp_path / "run") is None


def test_a_run_in_a_folder_with_a_timestamp_is_found_again(data: Path, tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path / "run.{timestamp}", f"data_path={data}", *COMMON, "run_steps=2")
    (run,) = tmp_path.glob("run.*")
    assert read_manifest(committed_checkpoints(run)[-1].path).step == 4


def test_evaluation_folders_count_where_nothing_is_trained(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "run", f"data_path={data}", *COMMON)
    main(["export", f"ckpt_load_path={tmp_path / 'run'}", f"output_path={tmp_path / 'exported'}"])
    alone = [f"ckpt_load_path={tmp_path / 'exported'}", "eval_only=true", f"eval_datasets={data / 'first'}", *COMMON]
    main(["train", "seq_length=32", "mixed_precision=false", *alone])
    assert "sep_token   0, the end_of_text of prepare.json" in "".join(capsys.readouterr())


@pytest.mark.parametrize("written", [2, "x", -1])
def test_prepared_datasets_that_disagree_or_cannot_be_read_are_an_error_until_sep_token_is_given(
    data: Path, tmp_path: Path, written: object
) -> None:
    prepare(data / "second", written)
    asked = [f"data_path={data}", *COMMON, "dry_run=true"]
    error = refusal(tmp_path / "run", *asked)
    assert "data/second" in str(error) and "sep_token" in error.settings
    start(tmp_path / "run", *asked, "sep_token=0")
    start(tmp_path / "run", *asked, "datasets=first")
