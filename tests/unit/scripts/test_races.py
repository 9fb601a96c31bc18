"""Races: contenders, of one process or several, train on the same sequences and come to the same losses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import ROOT, plain_environment

SMALL = ("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=64")
SMALLER = (*SMALL, "--num_hidden_layers=1", "--vocab_size=64", "--seq_length=32", "--mixed_precision=false")
SHORT = ("--rounds=1", "--steps=2", "--report_interval=2", "--global_batch_size=8", "--learning_rate=0.001")


def race(benchmark: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"scripts.benchmark.{benchmark}", *SMALLER, *SHORT, *flags]
    return subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("benchmark", "processes", "a_step"),
    [
        ("compare.against_ddp", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 1, "4 micro-batches of 2 x 32 tokens"),
        ("measure.host_memory", 1, "4 micro-batches of 2 x 32 tokens"),
    ],
)
@pytest.mark.slow
def test_both_contenders_end_at_the_same_loss(benchmark: str, processes: int, a_step: str) -> None:
    if benchmark == "compare.against_trainer":
        pytest.importorskip("accelerate")
    done = race(benchmark, f"--processes={processes}")
    assert done.returncode == 0, done.stderr
    assert f"a step is {a_step}\n" in done.stdout
    first, second = (line.split("|")[4] for line in done.stdout.splitlines() if re.match(r"\| \w", line))
    assert first == second
    assert re.search(r"^.+ / .+: \d\.\d{3} \(-\), median of 1 rounds", done.stdout, re.MULTILINE)
