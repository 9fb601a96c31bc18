"""Benchmarks refuse what they cannot measure before they begin, and name the flag."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import ROOT, plain_environment

from scripts.benchmark.common import Number, flag_parser


@pytest.mark.parametrize(
    ("benchmark", "flag", "problem"),
    [
        ("measure.loader", "--steps=5", "argument --steps: must be 20 or more"),
        ("measure.loader", "--tokens=1000", "argument --tokens: must be 10,000,000 or more"),
        ("measure.throughput", "--steps=9", "argument --steps: must be 10 or more"),
        ("measure.loss", "--seq_length=8", "unrecognized arguments: --seq_length=8"),
        ("compare.against_loaders", "--rounds=0", "argument --rounds: must be 1 or more"),
    ],
)
def test_a_flag_that_gives_nothing_to_measure_is_refused_at_once(benchmark: str, flag: str, problem: str) -> None:
    command = [sys.executable, "-m", f"scripts.benchmark.{benchmark}", flag]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and problem in done.stderr and done.stdout == ""


def test_numbers_are_whole_and_large_enough(capsys: pytest.CaptureFixture[str]) -> None:
    parser = flag_parser("Something.", steps=Number(1_000, "of a run", least=10))
    assert parser.parse_args([]).steps == 1_000 and parser.parse_args(["--steps=10"]).steps == 10
    for text in ("9", "ten", "-1"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--steps={text}"])
    assert "invalid whole_number value: 'ten'" in capsys.readouterr().err
    assert "of a run (default 1,000)" in parser.format_help()
