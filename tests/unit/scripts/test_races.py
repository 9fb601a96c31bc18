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


def race(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark" / script), *SMALLER, *SHORT, *flags]
    return subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("script", "processes", "a_step"),
    [
        ("against_ddp.py", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("against_trainer.py", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("against_trainer.py", 1, "4 micro-batches of 2 x 32 tokens"),
    ],
)
def test_both_contenders_end_at_the_same_loss(script: str, processes: int, a_step: str) -> None:
    if script == "against_trainer.py":
        pytest.importorskip("accelerate")
    done = race(script, f"--processes={processes}")
    assert done.returncode == 0, done.stderr
    assert f"a step is {a_step}\n" in done.stdout
    first, second = (line.split("|")[4] for line in done.stdout.splitlines() if re.match(r"\| \w", line))
    assert first == second
    assert re.search(r"^.+ / .+: \d\.\d{3} \(-\), median of 1 rounds", done.stdout, re.MULTILINE)


def test_a_contender_that_fails_ends_the_race() -> None:
    done = race("training_loop.py", "--processes=2", "--sharding_strategy=hsdp", "--hsdp_group_size=3")
    assert done.returncode == 1
    assert "needs groups of equal size" in done.stderr
    assert "a contender ended early: project. Its error stands above." in done.stderr
