"""The README's first command, shortened: raw text to a checkpoint, an evaluation and a sample of text."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_command

pytestmark = pytest.mark.thorough

VOCABULARY = 4096
STEPS = 60


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of the repository in a folder of their own, so that the demo's data and run land there."""
    for name in ("pretraining", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("main_training.py", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_demo_learns_from_real_text_and_names_the_way_to_continue(checkout: Path) -> None:
    # This interpreter's environment is ready: setup.sh only has to find that out, and the copy's own package is run.
    (checkout / "scripts" / "setup.sh").write_text(f'export PATH="{Path(sys.executable).parent}:$PATH"\n')
    environment = {"PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": ""}
    train = checkout / "scripts" / "train.sh"
    command: list[str | Path] = ["bash", train, f"--num_steps={STEPS}", "--eval_interval=30"]
    done = run_command(command, environment)
    assert "Training a tokenizer" in done.stderr
    assert "generated text:" in done.stdout

    run = checkout / "runs" / "demo"
    lines = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["evaluation_loss"] for line in lines if "evaluation_loss" in line]
    assert len(evaluations) == 2
    # An untrained model knows nothing: ln(V). The whole demo goes below 0.6 of it; a tenth of it gets this far.
    assert evaluations[-1] < evaluations[0] < math.log(VOCABULARY)
    assert evaluations[-1] < 0.8 * math.log(VOCABULARY)
    assert (run / "checkpoints" / f"step_{STEPS}_ckp" / "manifest.json").is_file()

    again = run_command(command, environment)
    assert "Training a tokenizer" not in again.stderr
    assert f"already finished, at step {STEPS} of {STEPS}" in again.stdout
    assert "--num_steps" in again.stdout
