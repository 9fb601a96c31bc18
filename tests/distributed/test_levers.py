"""Strategies, checkpointing, accumulation and compilation leave the loss curve alone, in any two of them together."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType

import pytest
from helpers import ROOT, run_command

SCRIPT = ROOT / "scripts" / "check_levers.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("check_levers", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_fifty_losses_are_the_same_whatever_two_levers_meet() -> None:
    done = run_command([sys.executable, SCRIPT, "--cover"], timeout=880)
    assert " runs of 50 steps; the reference's loss goes from " in done.stdout


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
