"""scripts/soak.py: kills until the number is reached, then the end, compared."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import ROOT, run_command

SHORT = ["--num_steps=12", "--kills=2"]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("soak")


def assert_ended_equal(said: str, folder: Path) -> None:
    assert said.startswith("reference: 12 steps")
    assert re.search(r"^2 kills in \d+ starts; \d+ runs ended equal", said, re.MULTILINE)
    assert sum(map(int, re.findall(r"SIGKILL to (?:all|a rank) (\d+)", said))) == 2
    assert list(folder.iterdir()) == []


def test_a_run_that_is_killed_twice_ends_equal_and_leaves_nothing(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        ROOT / "scripts" / "soak.py",
        f"--folder={tmp_path}",
        *SHORT,
        "--whom=rank,all",
    ]
    assert_ended_equal(run_command(command, timeout=200).stdout, tmp_path)


def test_the_same_with_other_processes_at_each_start_ends_equal_to_rounding(
    soak: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soak.main([f"--folder={tmp_path}", *SHORT, "--whom=all", "--elastic"])
    assert_ended_equal(capsys.readouterr().out, tmp_path)


def test_a_run_that_fails_by_itself_is_told_and_kept(soak: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"BROKEN: .*reference, which nothing was done to, ended with \[1, 1\]"
    ) as ending:
        soak.main([f"--folder={tmp_path}", "--learning_rate=fast"])
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(ending.value)
    assert "learning_rate" in (kept / "reference" / "starts" / "1-rank-0.log").read_text()


def test_an_unknown_kind_of_kill_is_refused(soak: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--whom=rank,nobody"])
    assert "--whom=rank,nobody: give any of rank, all, term" in capsys.readouterr().err
