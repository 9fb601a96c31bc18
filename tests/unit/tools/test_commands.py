"""The settings of commands other than `pretrain train`, and rules for the settings of all commands."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from pretraining.cli import COMMANDS, main
from pretraining.config.command_line import read_words
from pretraining.config.fields import settings_of
from pretraining.config.rules import check_config, find_problems
from pretraining.config.training import CheckpointConfig, DataConfig, TrainConfig
from pretraining.config.values import limit_problem, parse_value
from pretraining.tools import demo
from pretraining.tools.commands import ImportConfig, PrepareConfig


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (PrepareConfig(source="stdlib"), "stdlib"),
        (PrepareConfig(input_path=("/texts/books/",)), "books"),
        (PrepareConfig(input_path=("wiki.jsonl.gz",)), "wiki"),
        (PrepareConfig(input_path=("v1.5",)), "v1.5"),
        (PrepareConfig(input_path=("a", "b"), dataset="both"), "both"),
        (PrepareConfig(input_path=("wiki.ndjson.zst",)), "wiki"),
        (PrepareConfig(hf_dataset="someone/web-text"), "web-text"),
    ],
)
def test_the_dataset_is_named_after_its_input(config: PrepareConfig, name: str) -> None:
    check_config(config)
    assert config.dataset_name == name


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PrepareConfig(), "input_path"),
        (PrepareConfig(input_path=("a",), source="stdlib"), "input_path"),
        (PrepareConfig(source="stdlib", tokenizer_path="t", vocab_size=300), "vocab_size"),
        (PrepareConfig(input_path=("a", "b")), "dataset"),
        (PrepareConfig(input_path=("a/*.txt",)), "dataset"),
        (PrepareConfig(input_path=("a",), dataset="x/y"), "dataset"),
        (PrepareConfig(input_path=("a/.hidden",)), "dataset"),
        (PrepareConfig(source="stdlib", hf_config="en"), "hf_config"),
        (ImportConfig(input_path="a", ckpt_save_path=""), "ckpt_save_path"),
        (TrainConfig(data=DataConfig(data_path="d"), checkpoint=CheckpointConfig(ckpt_save_path="")), "ckpt_save_path"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(config: Any, named: str) -> None:
    [problem] = find_problems(config)
    assert problem.names[0] == named


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_of_a_command_is_an_address_only_if_declared(command: str) -> None:
    for setting in filter(lambda setting: setting.is_path, settings_of(COMMANDS[command].settings).values()):
        if setting.may_be_address:
            assert parse_value(setting, "s3://bucket/x") in ("s3://bucket/x", ("s3://bucket/x",))
            continue
        with pytest.raises(ValueError, match="this setting takes no address"):
            parse_value(setting, "s3://bucket/x")
        assert limit_problem(setting, ("s3:/b",) if setting.many else "s3:/b")  # as Path normalizes it
        parse_value(setting, "./s3:/x")


# The demo of train.sh: which command lines mean it


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of train.sh."""
    monkeypatch.setenv("PRETRAINING_DEMO", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["--config", "my.yaml"], ["num_steps=5", "model.model_variant=tiny"], ["cfg.yaml"], ["--data-path", "/data"]],
)
def test_a_recipe_data_or_a_model_in_any_spelling_is_not_the_demo(folder: Path, words: list[str]) -> None:
    chosen = ([], ["num_steps=5", "--Ckpt-Save-Path=data_path"], ["optimizer=sgdm", "train.max_steps=100"])
    assert all(demo.settings_beside(read_words(TrainConfig, each)) for each in chosen)
    assert not demo.settings_beside(read_words(TrainConfig, words))


def test_without_train_sh_missing_data_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PRETRAINING_DEMO", raising=False)
    with pytest.raises(SystemExit):
        main(["train", "--num_steps=5"])
    assert "no data: give --data_path" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (-15, 75)])
def test_a_failed_preparation_exits_with_its_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, code))
    with pytest.raises(SystemExit) as end:
        main(["train"])
    assert end.value.code == exit_code
