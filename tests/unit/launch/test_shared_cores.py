"""Threads wait briefly for each other while other programs want the cores, and only then."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import plain_environment

from pretraining.launch import machine, shared_cores
from pretraining.launch.shared_cores import Contention, find_openmp, leaving_cores_to_others, seconds_waited


def test_cores_are_shared_once_threads_wait_for_them_and_no_longer_after_a_while_without() -> None:
    contention = Contention()
    assert not contention.look(0.05)
    assert contention.look(0.5)
    assert contention.look(0.05)  # between the two limits nothing changes
    looks = [contention.look(0.0) for _ in range(shared_cores.QUIET_LOOKS)]
    assert looks == [True] * (shared_cores.QUIET_LOOKS - 1) + [False]
    assert not contention.look(0.05)


def test_a_pause_of_the_other_programs_changes_nothing() -> None:
    contention = Contention()
    contention.look(0.5)
    for _ in range(3):
        assert all(contention.look(0.0) for _ in range(shared_cores.QUIET_LOOKS - 1))
        assert contention.look(0.05)


def test_waiting_is_read_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert seconds_waited() == {}  # as on macOS
    for thread, text in (("7", "10 1500000000 3\n"), ("8", "")):  # the second has just ended
        (tmp_path / "self" / "task" / thread).mkdir(parents=True)
        (tmp_path / "self" / "task" / thread / "schedstat").write_text(text)
    assert seconds_waited() == {"7": 1.5}


def test_the_openmp_of_torch_is_found_among_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert find_openmp() is None
    loaded = [
        "7f0000000000-7f0000001000 r-xp 00000000 fe:00 11   /site/a_package.libs/libgomp-1.so",
        "7f0000002000-7f0000003000 r-xp 00000000 fe:00 12   /site/torch/lib/libgomp.so.1",
        "7f0000004000-7f0000005000 rw-p 00000000 00:00 0",
    ]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text("\n".join(loaded))
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    find_openmp()
    assert opened == ["/site/torch/lib/libgomp.so.1"]


TEAM = """
import os, threading, torch
from pretraining.launch.shared_cores import IdleTeam, find_openmp

def threads() -> int:
    return len(os.listdir("/proc/self/task"))

torch.ones(1_000_000).sum()
openmp = find_openmp()
assert openmp is not None
before = threads()
team = IdleTeam(openmp, torch.get_num_threads())
print(threads() - before, torch.get_num_threads())
team.end()
torch.ones(1_000_000).sum()
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP comes with torch on Linux")
def test_with_the_idle_team_there_are_more_threads_than_cpus_and_those_that_compute_stay() -> None:
    cpus = len(os.sched_getaffinity(0))
    result = subprocess.run(
        [sys.executable, "-c", TEAM],
        env=plain_environment({"OMP_NUM_THREADS": str(cpus)}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    # The team's first thread is Python's, the second one counts; with the `cpus` that compute it is one too many.
    assert result.stdout.split() == ["2", str(cpus), str(cpus)]


class Team:
    """In place of an idle team: says that it is there, and that it has ended."""

    def __init__(self, openmp: object, threads: int) -> None:
        self.ended = threading.Event()
        teams.append(self)
        came.release()

    def end(self) -> None:
        self.ended.set()


teams: list[Team] = []
came = threading.Semaphore(0)


@pytest.fixture
def contended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process wait for a core all the time, and looks are short."""
    teams.clear()
    looks = iter(range(10**9))
    monkeypatch.setattr(shared_cores, "seconds_waited", lambda: {"7": float(next(looks))})
    monkeypatch.setattr(shared_cores, "find_openmp", lambda: object())
    monkeypatch.setattr(shared_cores, "IdleTeam", Team)
    monkeypatch.setattr(shared_cores, "SECONDS", 0.0)


@pytest.mark.usefixtures("contended")
def test_a_run_says_once_that_it_leaves_the_cores_to_others_and_ends_its_team(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    with leaving_cores_to_others(lambda: 2, {}):
        assert came.acquire(timeout=60)
    assert [team.ended.is_set() for team in teams] == [True]
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("other programs want these cores, too")


@pytest.mark.usefixtures("contended")
@pytest.mark.parametrize("name", shared_cores.WAITING)
def test_the_user_decides_how_threads_wait(name: str) -> None:
    before = threading.active_count()
    with leaving_cores_to_others(lambda: 2, {name: "1"}):
        assert threading.active_count() == before


@pytest.mark.usefixtures("contended")
@pytest.mark.parametrize(("name", "found"), [("find_openmp", None), ("seconds_waited", {})])
def test_nothing_is_watched_where_the_system_does_not_tell(
    name: str, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, name, lambda: found)
    before = threading.active_count()
    with leaving_cores_to_others(lambda: 2, {}):
        assert threading.active_count() == before
