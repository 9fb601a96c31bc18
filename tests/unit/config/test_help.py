"""What users read about settings is complete, fits the terminal and is current."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from pretraining.config.assignments import ALIASES
from pretraining.config.fields import required, sections_of, setting, settings_of
from pretraining.config.help import configurations_page, help_text
from pretraining.config.training import TrainConfig
from pretraining.config.variants import VARIANTS

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Small:
    """A command with few settings.

    Only the first line is shown.
    """

    output_path: str = required("where to write")
    a_name_that_is_longer_than_half_of_a_narrow_terminal: int = setting(3, "how many")
    kind: Literal["one", "two"] = setting("one", "which kind")


def test_docs_are_current() -> None:
    page = (ROOT / "docs" / "configurations.md").read_text(encoding="utf-8")
    command = "python -m pretraining.config.help > docs/configurations.md"
    assert page == configurations_page() + "\n", f"run `{command}`"


def test_the_module_prints_the_page() -> None:
    command = [sys.executable, "-m", "pretraining.config.help"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == configurations_page() + "\n"


def test_the_page_names_every_setting_variant_and_alias() -> None:
    page = configurations_page()
    for name in (*settings_of(TrainConfig), *ALIASES):
        assert f"| `{name}` |" in page
    for variant in VARIANTS:
        assert f"| {variant} |" in page
    for section in sections_of(TrainConfig):
        assert f"### {section}\n" in page


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
        "A command with few settings.",
        "  --output_path=TEXT          where to write [must be given]",
        "  --a_name_that_is_longer_than_half_of_a_narrow_terminal=N",
        "                              how many [3]",
        "  --kind=TEXT                 which kind (one of one, two)",
        "                              [one]",
    ]
