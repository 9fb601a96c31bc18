"""Units over the processes of a machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import run_command
from unit.tools.prepare.prepare_files import contents, json_lines

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare import encode, units
from pretraining.tools.prepare import prepare as run
from pretraining.tools.prepare.encode import Report
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import Counts

TEXTS = [f"Document {n} for several processes. " * 9 for n in range(60)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """An input of seven units, two threads, and a process a thread."""
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    train_tokenizer(TEXTS, 300).save(tmp_path)
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    monkeypatch.setitem(encode.THREADS_PER_PROCESS, "fastokens", 1)
    monkeypatch.setitem(encode.THREADS_PER_PROCESS, "tokenizers", 1)
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
    monkeypatch.setattr(encode, "ProcessPoolExecutor", pytest.fail)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there, num_workers=1))
    assert len(processes.files) == 7
    assert contents(Path(config.output_path)) == contents(Path(there))


def test_an_error_in_a_process_is_the_error_of_the_call(config: PrepareConfig) -> None:
    Path(config.input_path[0]).write_bytes(json_lines(TEXTS) + b"nonsense\n")
    with pytest.raises(DataError) as error:
        prepare(config)
    assert str(error.value.path).endswith("in.jsonl from byte 16,966") and error.value.row == 9
    assert not multiprocessing.active_children()


def test_an_output_that_one_process_cannot_write_is_an_error(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_units = run.encode_units

    def with_file_in_the_way(units: Any, encoding: Any, work: Any, *args: Any) -> None:
        work.files.rmdir()
        work.files.write_text("in the way")
        encode_units(units, encoding, work, *args)

    monkeypatch.setattr(run, "encode_units", with_file_in_the_way)
    with pytest.raises(DataError) as error:
        prepare(config)
    assert error.value.settings == ("output_path",)
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_ends_the_call(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill_one(counts: Counts) -> None:
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(killed[0], signal.SIGKILL)

    report_to(kill_one, monkeypatch)
    with pytest.raises(DataError) as error:
        prepare(config)
    assert error.value.settings == ("num_workers",)
    assert not multiprocessing.active_children()


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
units.UNIT_BYTES = 3000
encode.THREADS_PER_PROCESS.update(fastokens=1, tokenizers=1)
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
