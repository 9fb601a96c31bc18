"""The table of the settings in a dataclass."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

from pretraining.config.fields import build, required, sections_of, setting, settings_of
from pretraining.config.training import BatchConfig, TrainConfig
from pretraining.config.values import limit_problem


@dataclass(frozen=True)
class Size:
    """Size of something."""

    width: int = setting(4, "width")
    heights: tuple[int, ...] = setting((1, 2), "heights")


@dataclass(frozen=True)
class Mixed:
    """A required setting, a section with changed defaults, and a section with its class's defaults."""

    name: str = required("what it is called")
    size: Size = setting(Size(width=8), silent_change=True)
    batch: BatchConfig = setting(BatchConfig())


def test_a_setting_knows_its_section_and_default() -> None:
    settings = settings_of(Mixed)
    assert list(settings)[:3] == ["name", "width", "heights"]
    assert settings["name"].required and settings["name"].section == ""
    assert settings["width"].section == "size" and settings["width"].default == 8
    assert settings["batch_size"].section == "batch" and not settings["batch_size"].required
    assert sections_of(Mixed) == {"size": Size, "batch": BatchConfig}


def test_a_field_or_its_section_declares_a_silent_change_and_paths_do_so_by_name() -> None:
    assert {name for name, known in settings_of(Mixed).items() if known.silent_change} == {"width", "heights"}
    settings = settings_of(TrainConfig)
    assert settings["index_path"].silent_change and not settings["seq_length"].silent_change


def test_building_keeps_the_defaults_of_the_root() -> None:
    config = build(Mixed, {"name": "a", "heights": (3,), "batch_size": 5})
    assert config == Mixed("a", Size(width=8, heights=(3,)), BatchConfig(batch_size=5))


@pytest.mark.parametrize(
    "fields",
    [
        [("one", Size, Size()), ("two", Size, Size())],  # two sections with the same names
        [("mapping", dict[str, int], None)],  # no text parses into it
        [("several", tuple[int, ...] | None, None)],  # none and the empty tuple would have the same text
    ],
)
def test_a_root_with_unsupported_fields_is_refused(fields: list[tuple[str, Any, Any]]) -> None:
    with pytest.raises(TypeError):
        settings_of(make_dataclass("Root", fields, frozen=True))


def test_every_training_setting_has_help_and_a_valid_default() -> None:
    assert [name for name, known in settings_of(TrainConfig).items() if not known.help] == []
    assert [name for name, known in settings_of(TrainConfig).items() if limit_problem(known, known.default)] == []


DECLARATIONS = """
from dataclasses import dataclass
from typing import Literal

from pretraining.config.fields import PositiveInt, setting
from pretraining.config.training import BatchConfig, ParallelConfig


@dataclass(frozen=True)
class Section:
    size: PositiveInt = setting(2, "a number")
    wrong_size: PositiveInt | None = setting("two", "a number or none")  # refused
    kind: Literal["ddp", "fsdp"] = setting("fsdp", "a choice")
    misspelt_kind: Literal["ddp", "fsdp"] = setting("fdsp", "a choice")  # refused


ParallelConfig(sharding_strategy="hdsp")  # refused
BatchConfig(batch_size="two")  # refused
"""


@pytest.mark.thorough
def test_mypy_refuses_a_wrong_default_and_a_misspelt_choice(tmp_path: Path) -> None:
    (tmp_path / "declarations.py").write_text(DECLARATIONS)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "declarations.py")]  # with the checkout's cache
    found = subprocess.run(command, cwd=ROOT, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    refused = [number for number, line in enumerate(DECLARATIONS.splitlines(), 1) if line.endswith("# refused")]
    assert [int(line.split(":")[1]) for line in found.stdout.splitlines() if ": error: " in line] == refused
