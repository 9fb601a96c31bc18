"""The demo of train.sh: when a command line means it, its settings, and the one preparation of its data."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pretraining.cli import main
from pretraining.config.command_line import read_words
from pretraining.config.training import TrainConfig
from pretraining.tools import demo


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
