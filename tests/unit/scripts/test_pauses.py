"""What the garbage collector and the profiler take from training is measured again with a command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import ROOT, plain_environment

SMALL = ("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=64")
SMALLER = (*SMALL, "--num_hidden_layers=1", "--vocab_size=64", "--seq_length=32")


def rows(benchmark: str, *flags: str) -> list[list[str]]:
    """Of the table that a benchmark prints."""
    command = [sys.executable, "-m", f"scripts.benchmark.measure.{benchmark}", *SMALLER, *flags]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]


@pytest.mark.slow
def test_with_an_interval_the_collector_runs_that_often() -> None:
    by_itself, with_interval = rows("garbage", "--steps=12", "--gc_interval=4")
    assert by_itself[0] == "0"
    assert with_interval[0] == "4" and with_interval[4] == "3"


@pytest.mark.slow
def test_steps_that_are_recorded_and_the_end_of_a_range_have_a_row_each() -> None:
    step, recorded, end = rows("profiles", "--ranges=1")
    assert (step[0], recorded[0]) == ("a step", "a step that is recorded")
    assert float(end[1].replace(",", "")) > 0
