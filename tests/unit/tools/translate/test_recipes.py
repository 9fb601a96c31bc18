"""Files of other systems as recipes: a golden pair per system, and what the command prints and writes."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path

import pytest
from golden.make_translations import FOLDER, PAIRS

from pretraining.api import Trainer
from pretraining.config.command_line import load_train_config
from pretraining.config.fields import settings_of
from pretraining.errors import ConfigError, DataError
from pretraining.tools.commands import TranslateConfig
from pretraining.tools.translate.hook import translate_when_needed
from pretraining.tools.translate.translate import SYSTEMS, translate

load = partial(load_train_config, translate=translate_when_needed)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_translates_to_its_golden_recipe(name: str, tmp_path: Path) -> None:
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


def test_a_trainer_reads_files_of_other_systems() -> None:
    trainer = Trainer.from_recipe("steps.py", use_dummy_dataset=True)
    assert trainer.config.schedule.warmup_steps == load(["steps.py"]).schedule.warmup_steps


def test_a_recipe_overrides_another_systems_defaults_and_its_file_overrides_the_recipe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("use_dummy_dataset: true\nschedule: linear\ngrad_clip_thresh: 2\nlearning_rate: 1\n")
    caplog.set_level("INFO")
    config = load([], {"recipe": f"{mine},deepspeed.json"})
    assert (config.schedule.schedule, config.optimizer.grad_clip_thresh) == ("linear", 2.0)
    assert config.optimizer.learning_rate == 3e-4
    assert "(deepspeed)" in caplog.text and "not in the file" in caplog.text  # the start says what became of each key


def test_a_trainer_that_overrides_log_metrics_is_referred_to_extra_metrics(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Trainer):
        def _log_metrics(self) -> None: ...

    Mine.from_recipe("demo")._hook()
    assert "_log_metrics of Mine is never called: override extra_metrics" in caplog.text


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


def test_the_output_holds_no_secret_and_the_printed_command_reads_the_recipe_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, output = tmp_path / "a.yaml", tmp_path / "new folder" / "it's mine.yaml"
    foreign.write_text(
        "dist: {dtype: float32}\ncheckpoint: {directory: 'a: #b'}\nlogging: {wandb_api_key: my_secret}\n"
    )
    translate(TranslateConfig(str(foreign)))
    translate(TranslateConfig(str(foreign), output_path=str(output)))
    printed = capsys.readouterr().out
    assert "a: #b" in printed and "my_secret" not in printed
    assert shlex.split(printed.splitlines()[-1]) == ["pretrain", "train", f"--recipe={output}"]
    assert load([str(output)], {"use_dummy_dataset": "true"}).checkpoint.ckpt_save_path == "a: #b"
    with pytest.raises(ConfigError):  # train reads YAML
        translate(TranslateConfig("stub.yaml", output_path=str(tmp_path / "mine.json")))
    assert not (tmp_path / "mine.json").exists()


def test_the_signs_of_two_systems_never_overlap() -> None:
    assert set(settings_of(TranslateConfig)["kind"].choices) == set(SYSTEMS)
    for name, system in SYSTEMS.items():
        others = [sign for other, each in SYSTEMS.items() if other != name for sign in each.signs]
        assert [(sign, each) for sign in system.signs for each in others if f"{each}.".startswith(f"{sign}.")] == []
