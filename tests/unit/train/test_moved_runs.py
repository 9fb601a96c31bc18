"""docs/checkpoints.md, "Move, copy, branch, delete": every line runs, in order, in a new folder."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT
from unit.train.whole_runs import manifest_of, saved, start, started_at

from pretraining.cli import main

PAGE = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    section = PAGE.partition("## Move, copy, branch, delete")[2].partition("\n## ")[0]
    [block] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = [line.partition("  #")[0].partition(" # ")[0] for line in block.splitlines()]
    return [command.strip() for line in lines for command in line.split("&&")]


def test_every_command_about_moving_runs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("archive").mkdir()
    start(Path("runs/mine"), "num_steps=30", "checkpoint_interval=10", "report_interval=0")
    asked = commands()
    assert len(asked) == 11 and asked[0].startswith("pretrain train runs/mine ")
    for command in asked:
        if "set_aside" in command:
            assert started_at(Path("runs/branch")) == 20 and "step_40_ckp" in saved(Path("archive/mine"))
            assert len([name for name in saved(Path("runs/branch")) if "set_aside" in name]) == 1
        if command.startswith("pretrain"):
            main(shlex.split(command)[1:])
        else:
            subprocess.run(command, shell=True, check=True)
    assert started_at(Path("archive/mine")) == 40 and "step_20_ckp" not in saved(Path("archive/mine"))
    assert started_at(Path("runs/new")) == 0 and not Path("runs/copy").exists() and not Path("runs/mine").exists()
    assert "learning_rate: 0.0001" in manifest_of(Path("runs/branch"), 40)["config"]
