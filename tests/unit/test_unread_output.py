"""What is printed may find no reader, as in `pretrain plan | head -1`, or no room: no command ends with a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from tiers import first_quick
from training_runs import TINY

# Measures a moment; of the other commands nothing is changed.
PROGRAM = """
import sys
from pretraining.cli import run_console_script
if sys.argv[1] == "doctor":
    from pretraining.tools import doctor
    doctor.MATMUL_SIZE["cpu"], doctor.COPY_BYTES["cpu"] = 32, 2**20
    doctor.BUDGET_SECONDS = 0.001
run_console_script()
"""
DUMMY = [*(f"--{setting}" for setting in TINY), "--use_dummy_dataset", "--num_steps=2"]
COMMANDS = {
    "help": ["train", "--help"],
    "commands": ["--help"],
    "plan, search": ["plan", "--model_variant=llama3_8b", "--search=true"],
    "list": ["list", "{run}/sharded"],
    "inspect": ["inspect", *DUMMY, "--step=1", "--batch_size=200"],
    "inspect, json": ["inspect", *DUMMY, "--step=1", "--batch_size=200", "--json", "--tokens"],
    "translate": ["translate", "{run}/ds.json"],
    "verify, data": ["verify", "--data_path={run}/data"],
    "sample": ["sample", "{run}/sharded", "--prompt_tokens=1,2", "--max_new_tokens=2"],
    "export": ["export", "{run}/sharded", "--output_path={run}/exported"],
    "prepare": ["prepare", "--input_path={run}/text.txt", "--output_path={run}/tokens", "--vocab_size=300"],
    "doctor": ["doctor", "--disk_path=none"],
    "train, dry run": ["train", *DUMMY, "--dry_run=true", "--ckpt_save_path={run}/new"],
}


@pytest.fixture
def command(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command line of a test's command, with a run, data and files of its own."""
    shutil.copytree(ROOT / "tests" / "golden" / "run", tmp_path, dirs_exist_ok=True)
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5}))
    (tmp_path / "text.txt").write_text("once upon a time " * 100)
    return [sys.executable, "-c", PROGRAM, *(word.format(run=tmp_path) for word in COMMANDS[request.param])]


def run_unread(command: list[str]) -> tuple[int, str]:
    """Runs a command whose standard output nobody reads; returns its exit code and what it says on standard error."""
    with subprocess.Popen(
        command, cwd=ROOT, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    return process.returncode, said


@pytest.mark.parametrize("command", first_quick(*COMMANDS, quick=2), indirect=True)
def test_a_reader_that_has_gone_is_nothing_to_talk_about(command: list[str]) -> None:
    code, said = run_unread(command)
    assert "Traceback" not in said and "error" not in said and "written" not in said
    assert code == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", first_quick(*COMMANDS, quick=2), indirect=True)
def test_output_that_finds_no_room_is_one_error(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=plain_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
    assert "Traceback" not in done.stderr and "No space left on device" in done.stderr
    assert done.stderr.count("cannot be written") == 1 and done.returncode == 1


@pytest.mark.thorough
def test_a_sweep_goes_on_where_nobody_reads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "sweep", *DUMMY, "--seed=1,2", f"--sweep_path={tmp_path}/sweep"]
    code, said = run_unread(command)
    assert code == 0 and "Traceback" not in said
    assert (tmp_path / "sweep" / "sweep.csv").read_text().count("finished") == 2
