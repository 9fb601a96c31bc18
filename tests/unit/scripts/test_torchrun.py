"""torchrun.py: whose failure ends the job, and which messages of torchrun are left out."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
from helpers import ROOT
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pretraining.cli import _exit_with
from pretraining.errors import DataError

SHARES_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture(scope="module")
def torchrun() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchrun_script", ROOT / "scripts" / "torchrun.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def failed(*workers: tuple[int, int]) -> ChildFailedError:
    """Return torchrun's error for workers that end with (exit code, second); ranks from 4 up, local ranks from 0."""
    failures = {}
    for local_rank, (exit_code, second) in enumerate(workers):
        failure = ProcessFailure(local_rank=local_rank, pid=100, exitcode=exit_code, error_file="none")
        failure.timestamp = second
        failures[4 + local_rank] = failure
    return ChildFailedError("main_training.py", failures)


def run(torchrun: ModuleType, monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None, *flags: str) -> int:
    """Return the exit code if torchrun itself ends with this outcome."""

    def main(arguments: list[str]) -> None:
        assert arguments == ["--signals-to-handle=SIGQUIT", *flags, "job.py"]
        if outcome is not None:
            raise outcome

    monkeypatch.setattr(torchrun, "main", main)
    monkeypatch.setattr(torchrun, "heeded", tuple)  # a test suite in the background ignores SIGQUIT
    monkeypatch.setattr(multiprocessing, "SubprocessContext", multiprocessing.SubprocessContext)  # put back at the end
    monkeypatch.setenv("PRETRAINING_STARTED_AT", "0")
    for name in ("PRETRAINING_TIME_IS_OVER", SHARES_STORE):
        monkeypatch.setenv(name, "to be put back")
    monkeypatch.delenv(SHARES_STORE)
    code: int = torchrun.run([*flags, "job.py"])
    return code


def test_elastic_jobs_publish_their_store_in_each_rendezvous(
    torchrun: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for nodes, default, shares in ((["--nnodes=1:2"], "1", "1"), ([], "1:2", "1"), (["--nnodes=2"], "1", None)):
        monkeypatch.setenv("PET_NNODES", default)
        assert run(torchrun, monkeypatch, None, *nodes) == 0 and os.environ.get(SHARES_STORE) == shares
    assert run(torchrun, monkeypatch, SignalException("stop", signal.SIGQUIT)) == 131


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        *(([(7, 10)], 7), ([(1, 11), (-15, 11)], 1), ([(1, 11), (-9, 11)], 137), ([(1, 11), (-9, 41)], 1)),
        *(([(-11, 11), (1, 11)], 139), ([(-15, 11), (75, 11)], 75), ([(-15, 11), (-15, 11)], 143)),
    ],
)
def test_the_first_failure_decides_the_exit_code_of_the_job(
    torchrun: ModuleType, monkeypatch: pytest.MonkeyPatch, workers: list[tuple[int, int]], code: int
) -> None:
    assert run(torchrun, monkeypatch, failed(*workers)) == code


def test_the_error_of_one_rank_is_the_last_line(
    torchrun: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a worker leaves it for torchrun, whose table has the same text."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank, text in ((1, "error: rank 1: x.arrow: is damaged\n"), (None, "error: x.arrow: is damaged\n")):
        error = DataError("is damaged", path="x.arrow")
        error.rank = rank
        with pytest.raises(SystemExit):
            _exit_with(error)
        assert capsys.readouterr().err == text
        failure = ProcessFailure(local_rank=1, pid=100, exitcode=1, error_file=str(tmp_path / "error.json"))
        assert text.strip() in str(failure.message) and failure.timestamp > 1_700_000_000
        assert run(torchrun, monkeypatch, ChildFailedError("main_training.py", {5: failure})) == 1
        assert capsys.readouterr().err == (text if rank else "")


@pytest.mark.parametrize(
    ("number", "codes", "code"),
    [
        *((15, [0, 75], 75), (15, [], 75), (1, [75, 75], 75)),  # saved
        *((15, [75, -15], 75), (12, [75, -12], 75)),  # one has just started
        *((1, [143, 143], 143), (15, [75, 1], 1)),  # nothing to save; an error
        *((15, [75, -9], 143), (15, [-9, None], 143)),  # killed; out of reach
        *((2, [130, 130], 130), (2, [75, -2], 130), (2, [1], 130)),
    ],
)
def test_the_exit_codes_of_workers_decide_that_of_a_stopped_job(
    torchrun: ModuleType, number: int, codes: list[int | None], code: int
) -> None:
    assert torchrun.exit_code_after_stop(number, codes) == code


def test_a_third_interrupt_kills_the_workers(torchrun: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Mock()
    for name, value in (("newest", newest), ("is_stopping", False), ("next_signal", signal.SIGINT)):
        monkeypatch.setattr(torchrun.Workers, name, value)
    before = {number: signal.getsignal(number) for number in torchrun.STOP_SIGNALS}
    try:
        signal.signal(signal.SIGINT, torchrun.request_stop)
        with pytest.raises(SignalException) as stop:
            signal.raise_signal(signal.SIGINT)
        for second in (signal.SIGUSR1, signal.SIGHUP):  # a second request to stop is ignored
            signal.raise_signal(second)
        signal.raise_signal(signal.SIGINT)
        newest.send.assert_called_once_with(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [each.args for each in newest.send.call_args_list] == [(signal.SIGINT,), (signal.SIGKILL,)]
    assert stop.value.sigval == signal.SIGINT and torchrun.Workers.is_stopping
