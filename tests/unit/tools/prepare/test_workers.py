"""Units over threads and processes."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers import ROOT, plain_environment
from unit.tools.prepare.prepare_files import contents, json_lines, quiet

from pretraining.config.commands import PrepareConfig
from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.prepare import units, workers
from pretraining.tools.prepare.encoding_progress import Counts
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.workers import _attend, _work

TEXTS = [f"Document {n} for several processes. " * 9 for n in range(60)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    """An input of seven units, two threads, and a process a thread."""
    (tmp_path / "in.jsonl").write_bytes(json_lines(TEXTS))
    train_tokenizer(TEXTS, 300).save(tmp_path)
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    monkeypatch.setattr(workers, "THREADS_A_PROCESS", 1)
    return PrepareConfig(
        input_path=(str(tmp_path / "in.jsonl"),),
        output_path=str(tmp_path / "out"),
        tokenizer_path=str(tmp_path),
        num_workers=2,
    )


def test_processes_give_the_same_bytes_as_threads(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = prepare(config, quiet)
    monkeypatch.setattr(workers, "_encode_in_processes", pytest.fail)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there, num_workers=1), quiet)
    assert processes.files == 7
    assert contents(Path(config.output_path)) == contents(Path(there))


def test_an_error_in_a_process_is_the_error_of_the_call(config: PrepareConfig) -> None:
    Path(config.input_path[0]).write_bytes(json_lines(TEXTS) + b"nonsense\n")
    with pytest.raises(DataError, match=r"in\.jsonl, the line at byte [\d,]+: not valid JSON"):
        prepare(config, quiet)
    assert not multiprocessing.active_children()


def test_an_output_that_one_process_cannot_write_is_an_error(
    config: PrepareConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_processes = workers._encode_in_processes

    def without_folder(*args: Any) -> None:
        args[2].files.rmdir()
        in_processes(*args)

    monkeypatch.setattr(workers, "_encode_in_processes", without_folder)
    with pytest.raises(DataError, match=r"cannot be written: .*--output_path"):
        prepare(config, quiet)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("exitcode", "kind", "message"),
    [
        (-9, DataError, r"ended by signal 9; where that is 9, memory may have run out: give fewer --num_workers"),
        (1, RuntimeError, "has failed; its traceback stands above"),
    ],
)
def test_a_process_that_ends_early_ends_the_call(exitcode: int, kind: type[Exception], message: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    process = cast(Any, SimpleNamespace(exitcode=exitcode, join=lambda: None))
    with pytest.raises(kind, match=message):
        _attend(ours, process, iter(()), report=lambda counts: None)
    process.exitcode = 0
    assert not _attend(ours, process, iter(()), report=lambda counts: None)


class Gone:
    """A connection whose other end is closed."""

    def __init__(self, after: int) -> None:
        self.sent: list[object] = []
        self._after = after

    def send(self, message: object) -> None:
        if len(self.sent) == self._after:
            raise BrokenPipeError
        self.sent.append(message)

    def recv(self) -> object:
        raise EOFError


@pytest.mark.parametrize("after", [0, 1])
def test_a_worker_whose_parent_is_gone_ends_quietly(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *args: None)
    with pytest.raises(SystemExit) as ending:
        _work(cast(Any, Gone(after)), *cast(Any, (SimpleNamespace(tokenizer=None), None, 1)))
    assert ending.value.code is None


def test_workers_do_not_outlive_a_killed_call(config: PrepareConfig) -> None:
    program = f"""
import os, signal
from pretraining.cli import main
from pretraining.tools.prepare import run, units, workers
units.UNIT_BYTES, workers.THREADS_A_PROCESS = 3000, 1
encode_units = run.encode_units
def killed(*args):
    encode_units(*args[:-1], lambda counts: os.kill(os.getpid(), signal.SIGKILL))
run.encode_units = killed
main(["prepare", "--input_path={config.input_path[0]}", "--output_path={config.output_path}",
      "--tokenizer_path={config.tokenizer_path}", "--num_workers=2"])
"""
    # All of them hold the pipes of the output: it ends only when the last one has.
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (-9, "")
    prepare(config, quiet)
    there = f"{config.output_path}_1"
    prepare(replace(config, output_path=there), quiet)
    assert contents(Path(config.output_path)) == contents(Path(there))


def test_counts_add_up() -> None:
    a, b = Counts(1, 2, 3, 4, 5, 6), Counts(documents=10, tokens=20)
    assert a + b == Counts(11, 22, 3, 4, 5, 6)
    assert a + b - b == a
