"""`--help` is complete and fits the terminal, and docs/configurations.md is current."""

from __future__ import annotations

import pytest

from pretraining.config.fields import settings_of
from pretraining.config.help import help_text
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.tools.command_settings import PrepareConfig
from scripts.settings_page import PAGE, with_new_tables


def test_docs_are_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_new_tables(page) == page, "run `python scripts/settings_page.py`"


def test_help_explains_every_flag() -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", width=80)
    assert text.startswith("pretrain train: train a model\n")
    for name, known in settings_of(TrainConfig).items():
        assert f"  --{name}=" in text
        assert known.help.split()[0] in text
    assert "--recipe=A,B" in text and "[0.95]" in text
    assert "\n  DURATION " in text


def test_help_of_a_word_lists_settings_with_it_in_name_or_text() -> None:
    found = help_text(TrainConfig, "pretrain train", "train a model", width=110, topic="clip")
    assert found.lstrip().startswith("--grad_clip_thresh=X") and "--seed=" not in found
    names = [line.split("=")[0].strip() for line in help_text(TrainConfig, "t", "", topic="warm-up").splitlines()]
    assert "--warmup_steps" in names and "--num_steps" not in names


def test_an_unknown_group_is_an_error() -> None:
    for root in (TrainConfig, PrepareConfig):
        with pytest.raises(ConfigError) as error:
            help_text(root, "x", "y", topic="optimiser")
        assert ("did you mean optimizer?" in str(error.value)) is (root is TrainConfig)


@pytest.mark.parametrize(
    ("topic", "beginning"),
    [
        ("--warmup-steps", "of schedule: The learning rate over the run.\n  --warmup_steps=DURATION "),
        ("schedule.warmup_steps", "of schedule: The learning rate over the run.\n  --warmup_steps=DURATION "),
        ("eos_token", "of data: Token sources, and how documents become samples.\n  --sep_token=N"),  # its alias
        ("optimizer", "optimizer: "),
    ],
)
def test_help_of_one_flag_or_group_is_about_it_alone(topic: str, beginning: str) -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", topic=topic)
    assert text.startswith(beginning) and "--num_steps=" not in text and "usage:" not in text
