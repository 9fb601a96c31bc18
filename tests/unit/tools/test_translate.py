"""`pretrain translate`: what it prints and writes trains what the file itself would train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretraining.config.command_line import load_train_config
from pretraining.config.commands import TranslateConfig
from pretraining.config.recipes import translate_file
from pretraining.errors import ConfigError
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


def test_each_setting_stands_with_what_it_was_and_a_reason_stands_once(config: str) -> None:
    recipe = translate_file(config, accept_llama=True)
    assert recipe.translation is not None
    lines = recipe_text("config.json", recipe.translation).splitlines()
    assert "  hidden_size: 64  # model.d_model: 64" in lines
    assert "  ckpt_save_path: 'null'  # training.checkpoint_dir: null" in lines
    assert "#   training.other: a seed: 5 (not known to the reader of guide files)" in lines
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
