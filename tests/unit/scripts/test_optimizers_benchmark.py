from __future__ import annotations

import subprocess
import sys

import pytest
from helpers import ROOT, plain_environment

from pretraining.config.plugins import OPTIMIZERS

SMALL = ("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=48")
SMALLER = (*SMALL, "--num_hidden_layers=1", "--vocab_size=64", "--mixed_precision=false")


@pytest.mark.slow
def test_every_optimizer_has_a_row_in_every_layout() -> None:
    command = [sys.executable, "-m", "scripts.benchmark.measure.optimizers", *SMALLER, "--rounds=3", "--processes=1,3"]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:4] for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    rows = [tuple(cell.strip() for cell in line) for line in lines]
    several = [*OPTIMIZERS, "muon, gathered everywhere"]
    assert rows == [
        *((name, "1", "ddp") for name in OPTIMIZERS),
        *((name, "3", strategy) for strategy in ("fsdp", "ddp") for name in several),
    ]
