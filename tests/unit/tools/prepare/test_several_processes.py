"""`pretrain prepare` started by a launcher, a share a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from unit.tools.prepare.prepare_files import contents, json_lines

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.tools.prepare import units
from pretraining.tools.prepare.prepare import prepare

TEXTS = [f"Document {n} for several machines. " * 9 for n in range(60)]
UNIT_BYTES = 2500

# The command with small units; a process is killed before its KILL_AFTER-th file gets its name.
PROGRAM = f"""
import os, signal, sys
from pathlib import Path
from pretraining.cli import main
from pretraining.tools.prepare import units
units.UNIT_BYTES = {UNIT_BYTES}
left = int(os.environ.get("KILL_AFTER", 10**9))
replace = Path.replace
def counting(path, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(path, target)
Path.replace = counting
main(sys.argv[1:])
"""


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    return PrepareConfig(input_path=(str(tmp_path / "in.jsonl"),), output_path=str(tmp_path / "out"), vocab_size=280)


def expected(config: PrepareConfig) -> dict[str, bytes]:
    """What one process makes."""
    there = f"{config.output_path}_expected"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "UNIT_BYTES", UNIT_BYTES)
        assert prepare(replace(config, output_path=there)).files == 8
    return contents(Path(there))


def start(
    config: PrepareConfig, processes: int, kill_after: Sequence[int] = (), more: Sequence[list[str]] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Runs the command in several processes, as torchrun starts them, the last one first."""
    arguments = [f"--input_path={config.input_path[0]}", f"--output_path={config.output_path}", "--vocab_size=280"]
    started = []
    for rank in reversed(range(processes)):
        layout = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
        place = {"TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        if kill_after:
            place["KILL_AFTER"] = str(kill_after[rank])
        environment = plain_environment({**place, **{name: str(value) for name, value in layout.items()}})
        command = [sys.executable, "-c", PROGRAM, "prepare", *arguments, *(more[rank] if more else [])]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))  # type: ignore[call-overload]
    done = []
    for process in reversed(started):
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_makes_the_same_bytes_and_rank_0_speaks(config: PrepareConfig, processes: int) -> None:
    wanted = expected(config)
    done = start(config, processes)
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * processes
    assert "Train on it with" in done[0].stdout
    assert [one.stdout for one in done[1:]] == [""] * (processes - 1)
    assert contents(Path(config.output_path)) == wanted


def test_a_finished_dataset_ends_all_at_once(config: PrepareConfig) -> None:
    wanted = expected(config)
    finished = replace(config, output_path=f"{config.output_path}_expected")
    done = start(finished, 2)
    assert [one.returncode for one in done] == [0, 0]
    assert "prepared already" in done[0].stdout
    assert contents(Path(finished.output_path)) == wanted


@pytest.mark.thorough
def test_a_job_that_was_killed_goes_on_with_another_number_of_processes(config: PrepareConfig) -> None:
    wanted = expected(config)
    done = start(config, 3, kill_after=(12, 4, 3))
    assert [one.returncode for one in done] == [-signal.SIGKILL] * 3
    records = list((Path(config.output_path) / ".in.preparing/units").iterdir())
    assert 2 < len(records) < 8
    done = start(config, 2)
    assert [one.returncode for one in done] == [0, 0]
    assert "Going on with an interrupted call" in done[0].stdout
    assert contents(Path(config.output_path)) == wanted


@pytest.mark.thorough
def test_one_that_fails_ends_the_others_with_a_message(config: PrepareConfig) -> None:
    lines = json_lines(TEXTS).splitlines(keepends=True)
    lines[10] = b"nonsense\n"  # in the second unit, which rank 1 takes
    Path(config.input_path[0]).write_bytes(b"".join(lines))
    Path(config.output_path).mkdir()
    train_tokenizer(TEXTS, 280).save(Path(config.output_path))  # rank 0 would find the line in training one
    done = start(config, 3)
    assert [one.returncode for one in done] == [1, 1, 1]
    said = [one.stderr for one in done]
    assert said[0] == f"error: rank 1 has failed: {said[1].removeprefix('error: rank 1: ')}"
    assert "in.jsonl, the line at byte" in said[1] and "not valid JSON" in said[1] and said[2] == ""
    assert not Path(config.output_path, "in").exists()


def test_a_process_with_other_settings_or_input_than_rank_0_is_refused(config: PrepareConfig) -> None:
    done = start(config, 2, more=([], ["--tokens_per_file=7"]))
    assert [one.returncode for one in done] == [1, 1]
    assert "started with other settings than rank 0, or sees other input" in done[1].stderr
    assert "tokens_per_file: it has 100000000, asked for is 7" in done[1].stderr
