"""What users read about settings is complete, fits the terminal and is current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pretraining.config.commands import PrepareConfig
from pretraining.config.fields import settings_of
from pretraining.config.help import help_text, with_new_tables
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configurations.md").read_text(encoding="utf-8")


def test_docs_are_current() -> None:
    command = "python -m pretraining.config.help docs/configurations.md"
    assert with_new_tables(PAGE) == PAGE, f"run `{command}`"


def test_the_module_makes_the_tables_again_and_leaves_the_text_above_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.partition("## Settings")[0], encoding="utf-8")
    subprocess.run([sys.executable, "-m", "pretraining.config.help", str(page)], cwd=ROOT, check=True)
    assert page.read_text(encoding="utf-8") == PAGE


def test_help_explains_every_flag() -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", width=80)
    assert text.startswith("pretrain train: train a model\n")
    for name, known in settings_of(TrainConfig).items():
        assert f"  --{name}=" in text
        assert known.help.split()[0] in text
    assert "--recipe=A,B" in text
    assert "\nDURATION " in text


def test_a_group_that_is_not_there_is_an_error() -> None:
    for root in (TrainConfig, PrepareConfig):
        with pytest.raises(ConfigError) as error:
            help_text(root, "x", "y", topic="optimiser")
        assert ("did you mean optimizer?" in str(error.value)) is (root is TrainConfig)


@pytest.mark.parametrize(
    ("topic", "beginning"),
    [
        ("warmup_steps", "--warmup_steps=DURATION  (of schedule)\n"),
        ("--warmup-steps", "--warmup_steps=DURATION  (of schedule)\n"),
        ("schedule.warmup_steps", "--warmup_steps=DURATION  (of schedule)\n"),
        ("eos_token", "--sep_token=N"),  # its other name
        ("optimizer", "optimizer: "),
    ],
)
def test_help_of_one_flag_or_group_is_about_it_alone(topic: str, beginning: str) -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", topic=topic)
    assert text.startswith(beginning) and "--num_steps=" not in text and "usage:" not in text
