"""Threads spin only briefly while other programs want the cores, and only then."""

from __future__ import annotations

import ctypes
import itertools
import logging
import queue
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import PATIENCE_SECONDS

from pretraining.launch import machine, shared_cores
from pretraining.launch.shared_cores import find_openmp, leaving_cores_to_others


def test_the_openmp_of_torch_is_found_among_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", str)
    assert find_openmp() is None
    paths = ("/site/a_package.libs/libgomp-1.so", "/site/torch/lib/libgomp.so.1", "/lib/libc.so")
    (tmp_path / "self").mkdir()
    maps = "\n".join(f"7f0000000000-7f0000001000 r-xp 00000000 fe:00 11   {path}" for path in paths)
    (tmp_path / "self" / "maps").write_text(f"{maps}\n7f0000004000-7f0000005000 rw-p 00000000 00:00 0")
    assert str(find_openmp()) == "/site/torch/lib/libgomp.so.1"


events: queue.Queue[str] = queue.Queue()
teams: list[str] = []
waited = [0.0]


def hold_team(openmp: object, ended: threading.Event) -> None:
    """Replacement for the idle team that reports its start and its end."""
    teams.append("comes")
    events.put("team")
    ended.wait(0.02)
    teams.append("goes")


def wait_for_a_core(seconds: float) -> float:
    """Make a thread seem to have waited this long since the last check."""
    waited[0] += seconds
    events.put("look")
    return waited[0]


@pytest.fixture
def contended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a thread of this process wait for a core all the time, with short check intervals."""
    monkeypatch.setattr(shared_cores, "seconds_waited", lambda: wait_for_a_core(60.0))
    monkeypatch.setattr(shared_cores, "find_openmp", lambda: object())
    monkeypatch.setattr(shared_cores, "hold_idle_team", hold_team)
    monkeypatch.setattr(shared_cores, "CHECK_SECONDS", 0.0)


def next_events(*wanted: str) -> None:
    """Wait for these events, in this order."""
    for event in wanted:
        while events.get(timeout=PATIENCE_SECONDS) != event:
            pass


@pytest.mark.usefixtures("contended")
def test_a_run_sleeps_on_shared_cores_checks_again_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    before = threading.active_count()
    with leaving_cores_to_others(2, {}):
        next_events("team", "look", "team")
    assert threading.active_count() == before  # no thread is left
    assert teams == ["comes", "goes"] * (len(teams) // 2)  # one at a time
    assert len(caplog.messages) == 1


@pytest.mark.usefixtures("contended")
def test_threads_spin_if_no_other_program_wants_the_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run's own threads wait for each other, too: at most 0.22 s per second was measured."""
    caplog.set_level(logging.INFO, "pretraining")
    monkeypatch.setattr(shared_cores, "time", SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 1.0))))
    monkeypatch.setattr(shared_cores, "seconds_waited", lambda: wait_for_a_core(0.22))
    while not events.empty():
        events.get()
    with leaving_cores_to_others(2, {}):
        next_events(*["look"] * 5)
    assert "team" not in [events.get_nowait() for _ in range(events.qsize())] and not caplog.messages


@pytest.mark.usefixtures("contended")
@pytest.mark.parametrize(
    ("threads", "environ", "unknown"),
    [
        (1, {}, "nothing"),  # a single thread waits for no other
        (2, {"OMP_WAIT_POLICY": "1"}, "nothing"),  # the user decides how threads wait
        (2, {}, "find_openmp"),
        (2, {}, "seconds_waited"),
    ],
)
def test_nothing_is_watched_with_one_thread_or_without_measurements(
    threads: int, environ: dict[str, str], unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, unknown, lambda: None, raising=False)
    before = threading.active_count()
    with leaving_cores_to_others(threads, environ):
        assert threading.active_count() == before
