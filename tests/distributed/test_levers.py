"""Strategies, checkpointing, accumulation and compilation leave the loss curve alone, in any two of them together."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import ROOT, run_command

SCRIPT = ROOT / "scripts" / "check_levers.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("check_levers")


@pytest.mark.slow
def test_fifty_losses_are_the_same_whatever_two_levers_meet() -> None:
    done = run_command([sys.executable, SCRIPT, "--cover"])
    assert " runs of 50 steps; the reference's loss goes from " in done.stdout


def test_a_run_that_fails_ends_all_processes_of_its_launch_with_its_error(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        script, "settings_of", lambda combination: [*script.SETTINGS, "hsdp_group_size=3", "sharding_strategy=hsdp"]
    )
    with pytest.raises(SystemExit, match="needs groups of equal size"):
        script.train_all([("2", "hsdp", "none", "1", "false")], 1, tmp_path)
    assert not multiprocessing.active_children()


def test_in_the_cover_any_two_values_of_any_two_factors_meet(script: ModuleType) -> None:
    everything = list(itertools.product(*script.FACTORS.values()))
    cover = script.cover_pairs(everything)
    assert cover[0] == everything[0] and set(cover) <= set(everything)
    assert len(cover) == len(set(cover)) <= 30
    for (first, ones), (second, others) in itertools.combinations(enumerate(script.FACTORS.values()), 2):
        met = {(combination[first], combination[second]) for combination in cover}
        assert met == set(itertools.product(ones, others))


def test_a_curve_that_differs_or_ends_early_fails_the_check(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = [4.0, 3.0, 2.0]
    same, other = tuple("abcde"), tuple("vwxyz")
    for curve, shown in (([4.0, 3.0001, 2.0], "3.3e-05   TOO LARGE"), ([4.0, 3.0], "inf   TOO LARGE")):
        assert script.report({same: reference, other: curve}, reference) == 1
        assert shown in capsys.readouterr().out
    assert script.report({same: reference, other: [4.0, 3.00001, 2.0]}, reference) == 0
