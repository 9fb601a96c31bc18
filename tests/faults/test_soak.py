"""scripts/soak.py: kills until the number is reached, then the end, compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import soak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num_steps=12", "--kills=6", "--mirror", "--seed=1"], r"[1-9] lost disks$"),
        (
            ["--num_steps=12", "--kills=2", "--elastic"],
            r"(?s)\Areference: 12 steps.*^2 kills in \d+ starts; \d+ runs were equal",
        ),
        (["--kills=20", "--seed=1"], r"^20 kills in \d+ starts; \d+ runs were equal"),
    ],
    ids=["lost disks", "other processes at each start", "twenty kills"],
)
def test_killed_runs_end_equal(flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak.main([f"--folder={tmp_path}", *flags])
    assert re.search(said, capsys.readouterr().out.strip(), re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
