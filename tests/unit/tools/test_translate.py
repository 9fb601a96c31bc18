"""`pretrain translate`: what it prints and writes trains what the file itself would train."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from pretraining.config.command_line import load_train_config, parse_config
from pretraining.config.commands import TranslateConfig
from pretraining.config.foreign.kinds import KINDS
from pretraining.config.recipes import translate_file
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError, DataError
from pretraining.tools.translate import recipe_text, translate

CONFIG = {
    "model": {"d_model": 64, "n_heads": 2, "n_layers": 2, "dropout": 0.1},
    "training": {"checkpoint_dir": "null", "learning_rate": 1e-3, "seed": None, "other": "a\nseed: 5"},
    "data": {"dataset_name": "texts.jsonl", "max_length": 64},
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def test_the_recipe_that_is_written_is_what_the_file_is(config: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "mine.yaml"
    translate(TranslateConfig(config, output_path=str(output), accept_llama=True))
    assert load_train_config([str(output)]) == load_train_config([config], {"accept_llama": "true"})


def test_only_an_earlier_recipe_is_replaced(config: str, tmp_path: Path) -> None:
    output, link, pipe, theirs = (tmp_path / f"{name}.yaml" for name in ("mine", "link", "pipe", "theirs"))
    theirs.write_text("learning_rate: 1e-3\n")
    for _ in range(2):
        translate(TranslateConfig(config, output_path=str(output), accept_llama=True))
    link.symlink_to(output)
    os.mkfifo(pipe)
    for path, reason in (
        (theirs, "it is a file that holds something else"),
        (link, "it is a link"),
        (pipe, "it is a pipe"),
    ):
        with pytest.raises(DataError, match=f"cannot be written: {reason}"):
            translate(TranslateConfig(config, output_path=str(path), accept_llama=True))
    assert theirs.read_text() == "learning_rate: 1e-3\n" and link.is_symlink() and pipe.is_fifo()


def test_each_setting_stands_with_what_it_was_and_a_reason_stands_once(config: str) -> None:
    recipe = translate_file(config, accept_llama=True)
    assert recipe.translation is not None
    lines = recipe_text("config.json", recipe.translation).splitlines()
    assert "  hidden_size: 64  # model.d_model: 64" in lines
    assert "  ckpt_save_path: 'null'  # training.checkpoint_dir: null" in lines
    assert "#   training.other: a seed: 5 (not known to the reader of guide files)" in lines
    assert lines[-2:] == ["# Not understood, and not applied:", lines[-1]] and "training.other" in lines[-1]
    assert [line.split("  # ")[1] for line in lines if "texts.jsonl" in line] == [
        "data.dataset_name: texts.jsonl (prepare it first: pretrain prepare --input_path=texts.jsonl "
        "--output_path=data)",
        *["data.dataset_name: texts.jsonl"] * 3,
    ]


def test_it_is_printed_where_no_file_is_named(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    translate(TranslateConfig(config, accept_llama=True))
    printed = capsys.readouterr().out
    assert "  model.n_layers: 2 " in printed
    assert "\nmodel:\n  hidden_size: 64  # model.d_model: 64\n" in printed


def test_a_value_that_no_setting_takes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2},\n "gradient_clipping": "tight"}')
    with pytest.raises(ConfigError, match=r"ds.json:2: gradient_clipping: tight: a number is needed"):
        translate(TranslateConfig(str(path)))


@pytest.mark.parametrize(
    ("content", "problem"), [("{}", "holds no settings"), ('{"seed": 1}', "is a recipe of this project already")]
)
def test_a_file_with_nothing_to_translate_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        translate(TranslateConfig(str(path)))
    with pytest.raises(ConfigError, match="there is no such file"):
        translate(TranslateConfig(str(tmp_path / "b.json")))


@pytest.mark.parametrize("name", ["mine.txt", "mine.json", "mine.py", "mine"])
def test_a_recipe_is_written_under_a_name_that_train_reads_as_yaml(config: str, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match=rf"{name}: a recipe is YAML: end its name in \.yaml or \.yml"):
        translate(TranslateConfig(config, output_path=str(path), accept_llama=True))
    assert not path.exists()


def test_a_second_file_is_not_taken_for_a_flag_that_translate_lacks() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(TranslateConfig, ["a.toml", "b.json"])
    assert list(error.value.problems) == ["'b.json' sets nothing: write name=value or --name=value"]


def test_a_file_of_several_kinds_names_a_command_that_train_can_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "other", KINDS["stub"])
    path = tmp_path / "my mk.yaml"
    path.write_text("dist: {backend: gloo}\n")
    with pytest.raises(ConfigError, match=r"pretrain translate '.*my mk\.yaml' --from=stub --output_path=mine\.yaml"):
        parse_config(TrainConfig, [str(path)])


def test_the_command_that_trains_is_quoted_as_a_shell_wants_it(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new folder" / "it's mine.yaml"
    translate(TranslateConfig(config, output_path=str(output), accept_llama=True))
    assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == ["pretrain", "train", f"--recipe={output}"]
