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
    assert re.search(r"^2 kills in \d+ starts; \d+ runs ended equal", said, re.MULTILINE)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_the_same_with_other_processes_at_each_start_ends_equal_to_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak.main([f"--folder={tmp_path}", *SHORT, "--elastic"])
    assert_ended_equal(capsys.readouterr().out, tmp_path)


@pytest.mark.thorough
def test_a_run_that_fails_by_itself_is_told_and_kept(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"BROKEN: .*reference, which nothing was done to, ended with \[1, 1\]"
    ) as ending:
        soak.main([f"--folder={tmp_path}", "--learning_rate=fast"])
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(ending.value)
    assert "learning_rate" in (kept / "reference" / "starts" / "1-rank-0.log").read_text()


@pytest.mark.thorough
def test_a_start_that_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang_from_the_third_start_on(run: Path, logs: list[Path], settings: list[str], limit_seconds: float) -> object:
        if logs[0].name.startswith("3-"):
            settings, limit_seconds = [*settings, "num_steps=1000000"], 1.0
        return job(run, logs, settings, limit_seconds)

    job = soak.Job
    monkeypatch.setattr(soak, "Job", hang_from_the_third_start_on)
    monkeypatch.setattr(soak.Soak, "_draw", lambda *_: soak.Kill("SIGKILL to all", 0, "step", 10**9, 0.0))
    # The one that is ended second may find its peer gone first.
    with pytest.raises(
        SystemExit, match=r"start 3 of .* failed by itself, with \[(-9, -9|-9, 1|1, -9)\] \(-9: it hung\)"
    ):
        soak.main([f"--folder={tmp_path}", *SHORT])


@pytest.mark.slow
def test_twenty_kills_end_equal(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, "-m", "scripts.soak", f"--folder={tmp_path}", "--kills=20", "--seed=1"]
    said = run_command(command).stdout
    assert re.search(r"^20 kills in \d+ starts; \d+ runs ended equal", said, re.MULTILINE)
