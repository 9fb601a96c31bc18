"""Files of other systems as recipes: a golden pair per system, and what the command prints and writes."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

import pytest
from golden.make_translations import FOLDER, PAIRS

from pretraining.api import Trainer
from pretraining.config.command_line import load_train_config, parse_config
from pretraining.config.commands import TranslateConfig
from pretraining.config.fields import settings_of
from pretraining.errors import ConfigError, DataError
from pretraining.tools.translate.hook import translate_when_needed
from pretraining.tools.translate.translate import SYSTEMS, translate

load = partial(load_train_config, translate=translate_when_needed)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_makes_its_golden_recipe(name: str, tmp_path: Path) -> None:
    """If a change is meant: python tests/golden/make_translations.py."""
    translate(TranslateConfig(PAIRS[name], output_path=str(tmp_path / "mine.yaml")))
    assert (tmp_path / "mine.yaml").read_text() == (FOLDER / f"{name}.recipe.yaml").read_text()


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_starts_the_run_of_its_golden_recipe(name: str) -> None:
    flags = {"data_path": "mine", "num_steps": "5000"}
    config = load([f"{name}.recipe.yaml"], flags)
    for words, more in (([PAIRS[name]], {}), ([], {"recipe": PAIRS[name]})):
        found = load(words, flags | more)
        assert (found.model, found.optimizer, found.schedule) == (config.model, config.optimizer, config.schedule)
        assert (found.batch, found.run, found.checkpoint) == (config.batch, config.run, config.checkpoint)


def test_a_trainer_takes_such_a_file() -> None:
    trainer = Trainer.from_recipe("steps.py", use_dummy_dataset=True, ckpt_save_path=None)
    assert trainer.config.schedule.warmup_steps == load(["steps.py"]).schedule.warmup_steps


def test_a_recipe_wins_over_another_systems_defaults_and_its_file_over_the_recipe(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("use_dummy_dataset: true\nschedule: linear\ngrad_clip_thresh: 2\nlearning_rate: 1\n")
    config = load([], {"recipe": f"{mine},deepspeed.json"})
    assert (config.schedule.schedule, config.optimizer.grad_clip_thresh) == ("linear", 2.0)
    assert config.optimizer.learning_rate == 3e-4


def test_a_trainer_that_overrides_log_metrics_is_told_of_extra_metrics(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Trainer):
        def _log_metrics(self) -> None: ...

    Mine.from_recipe("demo")._hook()
    assert "_log_metrics of Mine is never called: override extra_metrics" in caplog.text


def test_the_start_logs_what_became_of_each_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(["stub.yaml"], {"use_dummy_dataset": "true", "optim.lr": "1e-2"})
    assert "stub.yaml is read as settings of another system (stub):" in caplog.text
    assert "optim.lr: 1e-2" in caplog.text
    assert "optim.betas: 0.9,0.999" in caplog.text and "default there, not in the file" in caplog.text


def test_only_an_earlier_recipe_is_replaced(tmp_path: Path) -> None:
    output, link, pipe, theirs = (tmp_path / f"{name}.yaml" for name in ("mine", "link", "pipe", "theirs"))
    theirs.write_text("learning_rate: 1e-3\n")
    for _ in range(2):
        translate(TranslateConfig("stub.yaml", output_path=str(output)))
    link.symlink_to(output)
    os.mkfifo(pipe)
    for path in (theirs, link, pipe):
        with pytest.raises(DataError) as error:
            translate(TranslateConfig("stub.yaml", output_path=str(path)))
        assert error.value.path == path
    assert theirs.read_text() == "learning_rate: 1e-3\n" and link.is_symlink() and pipe.is_fifo()


def test_a_recipe_is_printed_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    translate(TranslateConfig("deepspeed.json"))
    printed = capsys.readouterr().out
    assert "train_batch_size: 32" in printed and "\nbatch:\n  batch_size: 4  # train_micro_batch" in printed


def test_the_command_that_trains_is_quoted_as_a_shell_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new folder" / "it's mine.yaml"
    translate(TranslateConfig("stub.yaml", output_path=str(output)))
    assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == ["pretrain", "train", f"--recipe={output}"]


def test_a_recipe_has_a_name_that_train_reads_as_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine.json: a recipe is YAML: end its name in \.yaml or \.yml"):
        translate(TranslateConfig("stub.yaml", output_path=str(tmp_path / "mine.json")))
    assert not (tmp_path / "mine.json").exists()


def test_values_that_are_no_plain_texts_are_written_so_that_they_are_read_back(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("dist: {dtype: float32}\ncheckpoint: {directory: 'a: #b'}\n")
    translate(TranslateConfig(str(tmp_path / "a.yaml"), output_path=str(tmp_path / "mine.yaml")))
    assert load([str(tmp_path / "mine.yaml")], {"use_dummy_dataset": "true"}).checkpoint.ckpt_save_path == "a: #b"


def test_secrets_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("dist: {dtype: float32}\nlogging: {wandb_api_key: abc}\n")
    translate(TranslateConfig(str(tmp_path / "a.yaml")))
    assert "abc" not in capsys.readouterr().out


def test_the_kinds_of_the_command_are_the_systems() -> None:
    assert set(settings_of(TranslateConfig)["kind"].choices) == set(SYSTEMS)
    with pytest.raises(ConfigError, match="one of stub, guide, deepspeed, composed, nanogpt"):
        parse_config(TranslateConfig, ["stub.yaml"], {"from": "torchtitan"})


def test_no_sign_of_a_system_is_one_of_another() -> None:
    for name, system in SYSTEMS.items():
        others = [sign for other, each in SYSTEMS.items() if other != name for sign in each.signs]
        assert [(sign, each) for sign in system.signs for each in others if f"{each}.".startswith(f"{sign}.")] == []
