"""Units over threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import run_command
from unit.tools.prepare.prepare_files import contents, json_lines

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare import encode, units
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.console import Report
from pretraining.tools.prepare.encode import _killed
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import Encoding
from pretraining.tools.prepare.token_files import Counts

TEXTS = [f"Document {n} for several processes. " * 9 for n in range(60)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """An input of seven units, two threads, and a process a thread."""
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    train_tokenizer(TEXTS, 300).save(tmp_path)
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    monkeypatch.setattr(encode, "THREADS_A_PROCESS", 1)
    monkeypatch.setattr(encode, "POLL_SECONDS", 0.001)
    return PrepareConfig(
        input_path=(str(tmp_path / "in.jsonl"),),
        output_path=str(tmp_path / "out"),
        tokenizer_path=str(tmp_path),
        num_workers=2,
    )


def report_to(report: Report, patch: pytest.MonkeyPatch) -> None:
    """Calls a function whenever `prepare` is told what was done."""
    encode_units: Callable[..., None] = run.encode_units
    patch.setattr(run, "encode_units", lambda *args: encode_units(*args[:-1], report))


def test_processes_give_the_same_bytes_as_threads(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = prepare(config)
    monkeypatch.setattr(encode, "_encode_in_processes", pytest.fail)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there, num_workers=1))
    assert processes.files == 7
    assert contents(Path(config.output_path)) == contents(Path(there))


def test_an_error_in_a_process_is_the_error_of_the_call(config: PrepareConfig) -> None:
    Path(config.input_path[0]).write_bytes(json_lines(TEXTS) + b"nonsense\n")
    with pytest.raises(DataError, match=r"in\.jsonl, the line at byte [\d,]+: not valid JSON"):
        prepare(config)
    assert not multiprocessing.active_children()


def test_an_output_that_one_process_cannot_write_is_an_error(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_processes = encode._encode_in_processes

    def without_folder(*args: Any) -> None:
        args[2].files.rmdir()
        in_processes(*args)

    monkeypatch.setattr(encode, "_encode_in_processes", without_folder)
    with pytest.raises(DataError, match=r"cannot be written: .*--output_path"):
        prepare(config)
    assert not multiprocessing.active_children()


def test_a_bug_in_a_process_is_raised_with_its_traceback(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_units = run.encode_units

    def unknown_type(units: Any, encoding: Encoding, *args: Any) -> None:
        encode_units(units, replace(encoding, dtype="nonsense"), *args)

    monkeypatch.setattr(run, "encode_units", unknown_type)
    with pytest.raises(TypeError, match="nonsense") as error:
        prepare(config)
    assert "in encode_unit" in str(error.value.__cause__)


def test_a_process_that_is_killed_ends_the_call_and_is_named(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def kill_one(counts: Counts) -> None:
        if not killed:
            pid = multiprocessing.active_children()[0].pid
            assert pid is not None
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    report_to(kill_one, monkeypatch)
    with pytest.raises(DataError, match=r"\(number \d+\) was ended by signal 9; .*fewer --num_workers") as error:
        prepare(config)
    assert f"number {killed[0]}" in str(error.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("exitcodes", "message"),
    [
        ((0, -15, -11), "number 2.* was ended by signal 11; where that is signal 9, memory"),
        ((-15, 3, None), "number 1.* was ended by itself with status 3"),
        ((-15, 0, -15), "a process that encodes was ended. The same command goes on"),
    ],
)
def test_a_process_that_ends_early_is_told_from_those_that_were_ended(
    exitcodes: tuple[int | None, ...], message: str
) -> None:
    workers = [SimpleNamespace(pid=pid, exitcode=exitcode) for pid, exitcode in enumerate(exitcodes)]
    assert re.search(message, str(_killed(workers)))


def test_an_interruption_ends_all_processes_at_once_and_the_next_call_goes_on(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(counts: Counts) -> None:
        if counts.documents:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        report_to(interrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    assert not multiprocessing.active_children()
    prepare(config)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there, num_workers=1))
    assert contents(Path(config.output_path)) == contents(Path(there))


@pytest.mark.thorough
def test_workers_do_not_outlive_a_killed_call(config: PrepareConfig) -> None:
    program = f"""
import os, signal
from pretraining.cli import main
from pretraining.tools.prepare import encode, prepare as run, units
units.UNIT_BYTES, encode.THREADS_A_PROCESS, encode.POLL_SECONDS = 3000, 1, 0.001
encode_units = run.encode_units
def killed(*args):
    encode_units(*args[:-1], lambda counts: counts.documents and os.kill(os.getpid(), signal.SIGKILL))
run.encode_units = killed
main(["prepare", "--input_path={config.input_path[0]}", "--output_path={config.output_path}",
      "--tokenizer_path={config.tokenizer_path}", "--num_workers=2"])
"""
    # All of them hold the pipes of the output: it ends only when the last one has. Python's tracker of semaphores says
    # on the error stream that it removed what the killed process left.
    command = [sys.executable, "-c", program]
    done = run_command(command, check=False)
    assert done.returncode == -9 and "Traceback" not in done.stderr
    prepare(config)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there))
    assert contents(Path(config.output_path)) == contents(Path(there))
