"""`pretrain prepare` started by a launcher, a share a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from unit.tools.prepare.prepare_files import contents, json_lines

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.launch.layout import ProcessLayout
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare import units
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import PrepareSummary

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
        assert len(prepare(replace(config, output_path=there)).files) == 8
    return contents(Path(there))


def start(
    config: PrepareConfig, processes: int, kill_after: Sequence[int] = ()
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
        command = [sys.executable, "-c", PROGRAM, "prepare", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))  # type: ignore[call-overload]
    done = []
    for process in reversed(started):
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def test_any_number_of_processes_makes_the_same_bytes_and_one_says_so(config: PrepareConfig) -> None:
    wanted = expected(config)
    done = start(config, 3)
    assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * 3
    assert "".join(one.stdout for one in done).count("Train on it with") == 1
    assert contents(Path(config.output_path)) == wanted
    done = start(config, 2)  # which is finished
    assert [one.returncode for one in done] == [0, 0] and "prepared already" in done[0].stdout
    assert done[1].stdout == "" and contents(Path(config.output_path)) == wanted


@pytest.mark.thorough
def test_a_job_that_was_killed_goes_on_with_another_number_of_processes(config: PrepareConfig) -> None:
    wanted = expected(config)
    done = start(config, 3, kill_after=(8, 4, 3))
    assert [one.returncode for one in done] == [-signal.SIGKILL] * 3
    assert 2 < len(list(Path(config.output_path).glob(".in.preparing/unit_*"))) < 8
    done = start(config, 2)
    assert [one.returncode for one in done] == [0, 0]
    assert "are done)" in done[0].stdout
    assert contents(Path(config.output_path)) == wanted


@pytest.mark.thorough
def test_one_that_fails_says_so_and_nothing_is_finished_until_the_same_command_goes_on(config: PrepareConfig) -> None:
    good = Path(config.input_path[0]).read_bytes()
    lines = good.splitlines(keepends=True)
    lines[10] = lines[10].replace(b"{", b"!")  # in the second unit, which rank 1 takes
    Path(config.input_path[0]).write_bytes(b"".join(lines))
    Path(config.output_path).mkdir()
    train_tokenizer(TEXTS, 280).save(Path(config.output_path))  # rank 0 would find the line in training one
    done = start(config, 3)
    assert [one.returncode for one in done] == [0, 1, 0]
    assert done[1].stderr.startswith("error: rank 1: ") and "not valid JSON" in done[1].stderr
    assert not Path(config.output_path, "in").exists()
    Path(config.input_path[0]).write_bytes(good)
    start(config, 1)
    assert len(list(Path(config.output_path, "in").glob("*.arrow"))) == 8


def ranks(config: PrepareConfig, size: int, *order: int) -> list[PrepareSummary | None]:
    """Runs processes of a job, one after the other."""
    return [prepare(config, ProcessLayout(rank, size, rank, size, "torchrun", "", 0)) for rank in order]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", UNIT_BYTES)
    monkeypatch.setattr(run, "PLAN_SECONDS", 0)


@pytest.mark.usefixtures("small_units")
def test_the_process_that_finds_all_units_done_finishes(config: PrepareConfig) -> None:
    wanted = expected(config)
    first, *others, last = ranks(config, 9, 0, 8, *range(1, 8))  # rank 8 has no unit
    assert first is None and set(others) == {None}
    assert last is not None and contents(Path(config.output_path)) == wanted


@pytest.mark.usefixtures("small_units")
def test_without_the_plan_of_rank_0_a_process_does_not_wait_for_ever(config: PrepareConfig) -> None:
    with pytest.raises(DataError) as error:
        ranks(config, 2, 1)
    assert error.value.rank == 1 and error.value.settings == ("output_path",)
    assert ranks(config, 2, 0) == [None]
    with pytest.raises(DataError):
        ranks(replace(config, tokens_per_file=7), 2, 1)
    assert ranks(config, 2, 1) != [None]


@pytest.mark.usefixtures("small_units")
def test_rank_0_alone_decides_what_encodes(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    choose = run.choose_encoder

    def watched(tokenizer: Any, encoder: Any) -> Any:
        asked.append(encoder)
        return choose(tokenizer, encoder)

    monkeypatch.setattr(run, "choose_encoder", watched)
    ranks(config, 3, 0, 1)
    plan = json.loads(Path(config.output_path, ".in.preparing", "plan.json").read_text())
    assert asked == ["auto", plan["encoder"]] and plan["encoder"] != "auto"


@pytest.mark.usefixtures("small_units")
def test_of_two_that_find_all_done_at_once_one_finishes(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(config)
    make_manifest, summaries = run.manifest, []

    def overtaken(*args: Any) -> str:
        monkeypatch.setattr(run, "manifest", make_manifest)
        summaries.extend(ranks(config, 1, 0))
        return make_manifest(*args)

    monkeypatch.setattr(run, "manifest", overtaken)
    assert ranks(config, 1, 0) == [None]
    assert summaries != [None] and contents(Path(config.output_path)) == wanted
