"""What users read about settings is complete, fits the terminal and is current."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from pretraining.config.assignments import ALIASES
from pretraining.config.commands import InspectConfig, PrepareConfig
from pretraining.config.fields import required, sections_of, setting, settings_of
from pretraining.config.help import help_text, with_new_tables
from pretraining.config.recipes import shipped_recipes
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configurations.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Small:
    """A command with few settings.

    Only the first line is shown.
    """

    output_path: str = required("where to write")
    a_name_that_is_longer_than_half_of_a_narrow_terminal: int = setting(3, "how many")
    kind: Literal["one", "two"] = setting("one", "which kind")


def test_docs_are_current() -> None:
    command = "python -m pretraining.config.help docs/configurations.md"
    assert with_new_tables(PAGE) == PAGE, f"run `{command}`"


def test_the_module_makes_the_tables_again_and_leaves_the_text_above_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.partition("## Settings")[0], encoding="utf-8")
    subprocess.run([sys.executable, "-m", "pretraining.config.help", str(page)], cwd=ROOT, check=True)
    assert page.read_text(encoding="utf-8") == PAGE


def test_the_page_names_every_setting_variant_alias_and_recipe() -> None:
    for name in (*settings_of(TrainConfig), *ALIASES):
        assert f"| `{name}` |" in PAGE
    for variant in VARIANTS:
        assert f"| {variant} |" in PAGE
    for section in sections_of(TrainConfig):
        assert f"### {section}\n" in PAGE
    assert f"shipped recipes: {', '.join(f'`{name}`' for name in shipped_recipes())}." in PAGE


def test_help_explains_every_flag() -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", width=80)
    assert text.startswith("pretrain train: train a model\n")
    for name, known in settings_of(TrainConfig).items():
        assert f"  --{name}=" in text
        assert known.help.split()[0] in text
    assert "--recipe=A,B" in text
    assert "\nDURATION " in text


@pytest.mark.parametrize("width", [60, 80, 110])
def test_help_fits_the_terminal(width: int) -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", width=width)
    assert max(map(len, text.splitlines())) <= width


def test_help_stays_readable_where_the_terminal_is_not() -> None:
    assert help_text(TrainConfig, "c", "p", width=5) == help_text(TrainConfig, "c", "p", width=60)
    assert help_text(TrainConfig, "c", "p", width=400) == help_text(TrainConfig, "c", "p", width=110)


def test_help_takes_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert help_text(TrainConfig, "c", "p") == help_text(TrainConfig, "c", "p", width=77)


def test_help_of_a_flat_command() -> None:
    assert help_text(Small, "pretrain try", "try it", width=60).splitlines() == [
        "pretrain try: try it",
        "",
        "usage: pretrain try [--NAME=VALUE ...]",
        "",
        "--help=FLAG explains one flag",
        "",
        "A command with few settings.",
        "  --output_path=TEXT          where to write [must be given]",
        "  --a_name_that_is_longer_than_half_of_a_narrow_terminal=N",
        "                              how many [3]",
        "  --kind=TEXT                 which kind (one of one, two)",
        "                              [one]",
    ]


def test_help_of_one_group_shows_its_settings_alone() -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", topic="optimizer")
    assert text.startswith("optimizer: ") and "--adam_beta2=X" in text
    assert "--num_steps" not in text and "usage:" not in text
    assert "--help=FLAG explains one flag, --help=GROUP one group of them: model, data, batch, run," in help_text(
        TrainConfig, "pretrain train", "train a model", width=110
    )


@pytest.mark.parametrize(
    ("root", "said"),
    [
        (
            TrainConfig,
            r"--help=optimiser: there is no such flag or group. did you mean optimizer\? Groups of x: model,",
        ),
        (PrepareConfig, "--help=optimiser: there is no such flag or group. Groups of x: none"),
    ],
)
def test_a_group_that_is_not_there_is_an_error(root: type, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        help_text(root, "x", "y", topic="optimiser")


@pytest.mark.parametrize("topic", ["warmup_steps", "--warmup-steps", "schedule.warmup_steps"])
def test_help_of_one_flag_says_what_it_does_its_default_and_its_values(topic: str) -> None:
    text = help_text(TrainConfig, "pretrain train", "train a model", topic=topic)
    assert text.startswith("--warmup_steps=DURATION  (of schedule)\n") and "DURATION:" in text
    assert "Values: steps, tokens, epochs or percent, or none" in text and "--num_steps=" not in text


def test_help_of_another_name_explains_the_flag_that_it_means() -> None:
    assert help_text(TrainConfig, "c", "p", topic="eos_token").startswith("--sep_token=N")
    assert help_text(PrepareConfig, "c", "p", topic="dataset").startswith("--dataset=TEXT\n")


def test_a_commands_own_flags_stand_first() -> None:
    text = help_text(InspectConfig, "pretrain inspect", "show", width=80)
    assert text.index("--sample_id=") < text.index("--model_variant=")
