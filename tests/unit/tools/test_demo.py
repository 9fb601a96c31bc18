"""The demo of train.sh: when a command line means it, its settings, and the one preparation of its data."""

from __future__ import annotations

import json
import subprocess
import sys
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


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that prepare data, which fail with code 3 if RANK is inherited."""
    calls: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], stdout: int, check: bool) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        done = Path(command[-1].partition("=")[2]) / "stdlib" / "prepare.json"
        done.parent.mkdir(parents=True)
        done.write_text(json.dumps({}))
        return subprocess.CompletedProcess(command, 3 if "RANK" in env else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The configurations of the runs that are trained."""
    configs: list[TrainConfig] = []
    monkeypatch.setattr("pretraining.train.run.train", lambda config, *_, **options: configs.append(config))
    return configs


def test_without_a_choice_the_demo_is_prepared_once_and_trained_in_the_scripts_folder(
    folder: Path, prepared: list[list[str]], trained: list[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    main(["train"])
    main(["train", "num_steps=5", "--Ckpt-Save-Path=data_path"])  # a value that looks like a name chooses nothing
    main(["train", "optimizer=sgdm", "optimizer.lr_config.lr=1.0", "train.max_steps=100"])  # another system's words
    data = f"{folder}/data/demo"
    command = ["prepare", "--source=stdlib", "--vocab_size=4096", f"--output_path={data}"]
    assert prepared == [[sys.executable, "-m", "pretraining", *command]]
    first, second, third = trained
    assert (first.data.data_path, first.data.tokenizer_path) == (data, f"{data}/tokenizer.json")
    assert first.checkpoint.ckpt_save_path == f"{folder}/runs/demo"
    assert second.checkpoint.ckpt_save_path == "data_path" and second.run.num_steps.amount == 5
    assert (third.batch, third.optimizer.optimizer, third.run.num_steps.amount) == (first.batch, "sgdm", 100)


@pytest.mark.parametrize(
    "words",
    [["--config", "my.yaml"], ["num_steps=5", "model.model_variant=tiny"], ["cfg.yaml"], ["--data-path", "/data"]],
)
def test_a_recipe_data_or_a_model_in_any_spelling_is_not_the_demo(folder: Path, words: list[str]) -> None:
    assert demo.settings_beside([]) and not demo.settings_beside(read_words(TrainConfig, words))


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
