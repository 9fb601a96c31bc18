"""Output to a closed pipe, as in `pretrain plan | head -1`, or to a full disk gives no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_command
from tiers import first_quick
from training_runs import TINY

DUMMY = [*(f"--{setting}" for setting in TINY), "--use_dummy_dataset", "--num_steps=2"]
PRETRAIN = [sys.executable, "-c", "from pretraining.cli import run_console_script; run_console_script()"]
COMMANDS = {
    "help": ["train", "--help"],
    "inspect, json": ["inspect", *DUMMY, "--step=1", "--batch_size=200", "--json", "--tokens"],
    "list": ["list", str(ROOT / "tests/golden/run/sharded")],
    "train, dry run": ["train", *DUMMY, "--dry_run=true", "--ckpt_save_path=none"],
}


def run_unread(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is a closed pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        return run_command([*PRETRAIN, *command], check=False, stdout=unread)


@pytest.mark.parametrize("command", first_quick(*COMMANDS, quick=2))
def test_a_reader_that_has_gone_is_nothing_to_talk_about(command: str) -> None:
    done = run_unread(COMMANDS[command])
    assert not any(word in done.stderr for word in ("Traceback", "error", "written")) and done.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", first_quick(*COMMANDS, quick=2))
def test_output_that_finds_no_room_is_one_error(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = run_command([*PRETRAIN, *COMMANDS[command]], check=False, stdout=full)
    assert "Traceback" not in done.stderr and "No space left on device" in done.stderr
    assert done.stderr.count("cannot be written") == 1 and done.returncode == 1


@pytest.mark.thorough
def test_a_sweep_continues_without_a_reader(tmp_path: Path) -> None:
    done = run_unread(["sweep", *DUMMY, "--seed=1,2", f"--sweep_path={tmp_path}/sweep"])
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert (tmp_path / "sweep" / "sweep.csv").read_text().count("finished") == 2
