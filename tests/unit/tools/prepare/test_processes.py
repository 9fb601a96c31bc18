"""Units over the processes of a machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.tools.prepare.prepare_files import contents, json_lines, made_elsewhere, prepare_config

from pretraining.data.tokenizer import train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
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
    return prepare_config(tmp_path, tokenizer_path=str(tmp_path), num_workers=2)


def report_to(report: Report, patch: pytest.MonkeyPatch) -> None:
    """Call a function whenever `prepare` counts what was done."""
    encode_units: Callable[..., None] = run.encode_units
    patch.setattr(run, "encode_units", lambda *args: encode_units(*args[:-1], report))


def test_processes_give_the_same_bytes_as_threads(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(prepare(config).files) == 7
    monkeypatch.setattr(encode, "ProcessPoolExecutor", pytest.fail)
    assert contents(config.output_path) == made_elsewhere(config, num_workers=1)


def test_an_error_in_a_process_is_the_error_of_the_call(config: PrepareConfig) -> None:
    good = Path(config.input_path[0]).read_bytes()
    Path(config.input_path[0]).write_bytes(good + b"nonsense\n")
    with pytest.raises(DataError) as error:
        prepare(config)
    assert str(error.value.path).endswith("in.jsonl from byte 16,966") and error.value.row == 9
    assert "--bad_records=skip" in str(error.value)
    assert not multiprocessing.active_children()


def test_a_killed_worker_fails_the_call(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_interrupt_stops_all_processes_and_the_next_call_resumes(
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
    assert contents(config.output_path) == made_elsewhere(config, num_workers=1)
