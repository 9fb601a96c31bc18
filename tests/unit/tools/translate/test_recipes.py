"""Files of other systems as recipes: a golden pair per system, and what the command prints and writes."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden.make_translations import FOLDER, PAIRS
from unit.tools.translate.loading import load

from pretraining.api import Trainer
from pretraining.cli import main
from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.errors import ConfigError, DataError
from pretraining.optim.registry import user_defined_arguments
from pretraining.tools.command_settings import TranslateConfig
from pretraining.tools.translate.command import translate_file


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


@pytest.mark.parametrize("name", PAIRS)
def test_a_file_is_its_golden_recipe_translated_or_started(name: str, tmp_path: Path) -> None:
    """If a change is meant: python tests/golden/make_translations.py."""
    translate_file(TranslateConfig(PAIRS[name], output_path=str(tmp_path / "mine.yaml")))
    assert (tmp_path / "mine.yaml").read_text() == (FOLDER / f"{name}.recipe.yaml").read_text()
    flags = {"data_path": "mine", "num_steps": "20Mtok"}
    config = load([f"{name}.recipe.yaml"], flags)
    found = [load([PAIRS[name]], flags), load([], flags | {"recipe": PAIRS[name]})]
    for each in (*found, Trainer.from_recipe(PAIRS[name], **flags).config):
        for section in ("model", "optimizer", "schedule", "batch", "run", "checkpoint"):
            assert getattr(each, section) == getattr(config, section)


def test_another_systems_file_over_a_recipe_brings_what_it_says_and_no_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("use_dummy_dataset: true\nschedule: linear\ngrad_clip_thresh: 2\nlearning_rate: 1\n")
    caplog.set_level("INFO")
    config = load([], {"recipe": f"{mine},deepspeed.json"})
    assert (config.schedule.schedule, config.optimizer.grad_clip_thresh) == ("linear", 2.0)
    assert config.optimizer.learning_rate == 3e-4
    assert "(deepspeed)" in caplog.text  # the start says what became of each key
    (tmp_path / "over.json").write_text('{"training": {"num_epochs": 2, "logging_steps": 7}}')
    config = load([], {"recipe": f"demo,{tmp_path / 'over.json'}", "data_path": "x"})
    ours = load([], {"recipe": "demo", "data_path": "x", "num_steps": "2ep", "report_interval": "7"})
    assert config == ours
    config = load([], {"recipe": "guide.json,deepspeed.json", "data_path": "x"})  # what neither says is DeepSpeed's
    assert (config.schedule.schedule, config.optimizer.grad_clip_thresh) == ("constant", 0.0)


def test_what_a_file_leaves_open_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(["stub.yaml"], {"optimizer": "adam", "adam_beta2": "0.9"})
    assert "left open by stub.yaml, and as here: grad_clip_thresh=1.0" in caplog.messages
    load(["deepspeed.json", "use_dummy_dataset=true"])  # constant: no end of a schedule
    assert caplog.messages[-2] == (
        "not given, and as there: schedule=constant, warmup_steps=0, grad_clip_thresh=0, mixed_precision=false"
    )
    assert caplog.messages[-1] == "left open by deepspeed.json, and as here: seq_length=4096, num_steps=1000"


def test_a_trainer_that_overrides_log_metrics_is_referred_to_extra_metrics(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Trainer):
        def _log_metrics(self) -> None: ...

    Mine.from_recipe("demo")._hook()
    assert "_log_metrics of Mine is never called: override extra_metrics" in caplog.text


def test_only_an_earlier_recipe_is_replaced(tmp_path: Path) -> None:
    output, link, pipe, theirs = (tmp_path / f"{name}.yaml" for name in ("mine", "link", "pipe", "theirs"))
    theirs.write_text("learning_rate: 1e-3\n")
    for _ in range(2):
        translate_file(TranslateConfig("stub.yaml", output_path=str(output)))
    link.symlink_to(output)
    os.mkfifo(pipe)
    for path in (theirs, link, pipe):
        with pytest.raises(DataError) as error:
            translate_file(TranslateConfig("stub.yaml", output_path=str(path)))
        assert error.value.path == path
    assert theirs.read_text() == "learning_rate: 1e-3\n" and link.is_symlink() and pipe.is_fifo()


def test_the_output_holds_no_secret_and_the_printed_command_reads_the_recipe_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, output = tmp_path / "a.yaml", tmp_path / "new folder" / "it's mine.yaml"
    foreign.write_text(
        "dist: {dtype: float32}\ncheckpoint: {directory: 'a: #b'}\nlogging: {wandb_api_key: my_secret}\n"
    )
    with pytest.raises(ConfigError) as refused:
        translate_file(TranslateConfig(str(foreign)))
    assert "wandb_api_key: (not shown)" in str(refused.value)
    translate_file(TranslateConfig(str(foreign), accept_unknown=True))
    translate_file(TranslateConfig(str(foreign), accept_unknown=True, output_path=str(output)))
    printed = capsys.readouterr().out
    assert "a: #b" in printed and "my_secret" not in printed
    assert shlex.split(printed.splitlines()[-1]) == ["pretrain", "train", f"--recipe={output}"]
    assert load([str(output)], {"use_dummy_dataset": "true"}).checkpoint.ckpt_save_path == "a: #b"
    with pytest.raises(ConfigError):  # train reads YAML
        translate_file(TranslateConfig("stub.yaml", output_path=str(tmp_path / "mine.json")))
    assert not (tmp_path / "mine.json").exists()


def test_a_recipe_with_a_key_of_another_system_is_no_file_of_that_system(tmp_path: Path) -> None:
    mine, over, defaults = (tmp_path / f"{name}.yaml" for name in ("mine", "over", "defaults"))
    mine.write_text("model_variant: tiny\nuse_dummy_dataset: true\nnum_epochs: 2\ndropout: 0.1\n")
    over.write_text("training: {learning_rate: 3e-4}\n")
    for recipe, keys in ((str(mine), ["num_epochs", "dropout"]), (f"demo,{over}", ["training.learning_rate"])):
        with pytest.raises(ConfigError) as error:
            load([], {"recipe": recipe})
        named = [f"{recipe.removeprefix('demo,')}: {key} is not known" for key in keys]
        assert len(error.value.problems) == len(keys) and all(map(str.startswith, error.value.problems, named))
    translate_file(TranslateConfig(str(over), kind="guide"))
    defaults.write_text("defaults: [train]\n")  # a composed file may name its parts alone
    (tmp_path / "train.yaml").write_text("max_steps: 5\n")
    assert load([str(defaults)], {"use_dummy_dataset": "true"}).run.num_steps.amount == 5


def test_arguments_beside_a_file_are_translated_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "mine.yaml"
    words = ["guide.json", "training.batch_size=4", "--num_epochs=2", "--learning_rate=3e-3", "--ckpt_save_path=mine"]
    main(["translate", *words, f"--output_path={output}"])
    text = output.read_text()
    for line in ("batch_size: 4", "num_steps: 2ep", "learning_rate: 0.003", "ckpt_save_path: mine"):
        assert f"  {line}\n" in text
    main(["translate", "stub.yaml", "--max_tokens=5B"])
    assert "  num_steps: 5Btok\n" in capsys.readouterr().out
    for wrong in ("--num_epchs=2", "more.json"):
        with pytest.raises(SystemExit):
            main(["translate", "guide.json", wrong])


# Numbers that other systems define otherwise

WITHOUT_DATA = {name: {"use_dummy_dataset": "true"} for name in ("deepspeed", "composed")}


def test_the_global_batch_of_a_guide_is_the_same_on_any_number_of_ranks() -> None:
    config = load(["guide.json"], {"data_path": "x"})
    assert {resolve_batch_sizes(config.batch, ranks).global_batch_size for ranks in (1, 2, 8)} == {64}


def test_words_without_a_file_mean_what_they_mean_beside_one(tmp_path: Path) -> None:
    """Momentum that is a mean of gradients is read as a sum: the steps would be 10 times too long."""
    words = ["optimizer=sgdm", "optimizer.lr_config.lr=1.0", "train.max_steps=200"]
    (tmp_path / "config.yaml").write_text("defaults: [{optimizer: sgdm}]\n")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "sgdm.yaml").write_text("lr_config: {lr: 0.1}\nbeta: 0.9\n")
    alone, beside = (load(each, WITHOUT_DATA["composed"]) for each in (words, [str(tmp_path / "config.yaml"), *words]))
    assert alone.optimizer == replace(beside.optimizer, grad_clip_thresh=0.0, weight_decay=0.0)
    assert (alone.schedule.schedule, alone.parallel.mixed_precision) == ("constant", False)
    assert (alone.optimizer.learning_rate, alone.optimizer.momentum) == (0.1, 0.9)
    for torchs in (["optimizer.momentum=0.9", words[0]], ["optimizer.beta=0.9", "optimizer=normalized_sgdm"]):
        config = load(["optimizer.lr_config.lr=0.5", *torchs], WITHOUT_DATA["composed"]).optimizer
        assert (config.learning_rate, config.momentum) == (0.5, 0.9)  # which are not scaled
    found = load(["train.max_steps=7"], WITHOUT_DATA["composed"])  # one word brings no defaults
    assert found == load([], {**WITHOUT_DATA["composed"], "num_steps": "7"})


def test_a_files_settings_of_a_user_defined_optimizer_become_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()
    source = "class Lion:\n    def __init__(self, params, lr, weight_decay, momentum, gamma): ...\n"
    (tmp_path / "my_package" / "lion.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load(["composed/config.yaml", "optimizer=mine"], WITHOUT_DATA["composed"]).optimizer
    assert user_defined_arguments(config) == {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "gamma": 0.3}


def test_four_times_the_width_is_rescaled_and_other_widths_are_kept() -> None:
    def width(**model: Any) -> int | None:
        flags = {"use_dummy_dataset": "true", "model.n_heads": "4", "model.n_layers": "2"}
        named = {f"model.{name}": str(value) for name, value in model.items()}
        return load(["guide.json"], {**flags, **named}).model.intermediate_size

    assert width(d_model=768, d_ff=3072) == 2048
    assert width(d_model=768, d_ff=2304) == 2304
    assert width(d_model=768, d_ff=3072, activation="swiglu") == 3072
