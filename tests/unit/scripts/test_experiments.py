"""The experiments of docs/experiments.md: every one is a sweep that would start, and the tables say what runs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretraining.tools.sweep import read_sweep
from scripts.experiments import (
    command_of,
    experiments,
)


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_is_a_sweep_of_settings_that_fit_each_other(name: str, tmp_path: Path) -> None:
    _, _, package, verb, *flags = command_of(name, tmp_path, Path("data/demo"))
    assert (package, verb) == ("pretraining", "sweep")
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    assert len(read_sweep((), given)[1]) in (2, 3, 4)
