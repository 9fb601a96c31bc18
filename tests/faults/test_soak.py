"""scripts/soak.py: kills until the number is reached, then the end, compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers import run_command

from scripts import soak

SHORT = ["--num_steps=12", "--kills=2"]


def assert_ended_equal(said: str, folder: Path) -> None:
    assert said.startswith("reference: 12 steps")
    assert re.search(r"^2 kills in \d+ starts; \d+ runs were equal", said, re.MULTILINE)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_runs_that_lose_their_disks_end_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak.main([f"--folder={tmp_path}", "--num_steps=12", "--kills=6", "--mirror", "--seed=1"])
    assert re.search(r"[1-9] lost disks$", capsys.readouterr().out.strip())


@pytest.mark.slow
def test_the_same_with_other_processes_at_each_start_ends_equal_to_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak.main([f"--folder={tmp_path}", *SHORT, "--elastic"])
    assert_ended_equal(capsys.readouterr().out, tmp_path)


@pytest.mark.slow
def test_twenty_kills_end_equal(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "scripts.soak", f"--folder={tmp_path}", "--kills=20", "--seed=1"]
    said = run_command(command).stdout
    assert re.search(r"^20 kills in \d+ starts; \d+ runs were equal", said, re.MULTILINE)
