from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PATIENCE_SECONDS

from pretraining.config.training import GuardConfig
from pretraining.distributed import watchdog as watchdog_module
from pretraining.distributed.processes import COLLECTIVE_TIMEOUT, Processes
from pretraining.distributed.watchdog import (
    MOST_NAMED,
    Hang,
    HangDetector,
    Heartbeat,
    Heartbeats,
    Watchdog,
    collective_timeout,
    describe,
)
from pretraining.progress import Duration


def seconds(amount: float) -> Duration:
    return Duration(amount, "seconds")


def beat(count: int = 1, progress: int = 1, step: int = 5, doing: str = "training") -> Heartbeat:
    return Heartbeat(count, progress, step, doing, "node")


def processes(world_size: int, rank: int = 0) -> Processes:
    made = Processes(rank, world_size, rank, world_size, torch.device("cpu"))
    made.activity.turn_to("training")
    made.activity.step = 5
    return made


GUARD = replace(GuardConfig(), hang_timeout=seconds(0.4), first_step_timeout=seconds(0.8))


# When it is a hang


Answer = dict[int, Heartbeat] | None
GETTING_ON: list[Answer] = [{1: beat(count, progress=count)} for count in range(1, 20)]
SILENT: list[Answer] = [{1: beat(count=3), 2: beat(count=4)}, {1: beat(count=3), 2: beat(count=9)}]


def looks_until_a_hang(answers: list[Answer], progress: list[int], timeout: float = 10.0) -> tuple[int, Hang | None]:
    """Looks every second, at last 200 times; the last progress and the last answer stay."""
    waiting = iter(answers)
    detector = HangDetector(lambda: next(waiting, answers[-1]))
    for number in range(200):
        hang = detector.update(1.0, progress[min(number, len(progress) - 1)], timeout)
        if hang is not None:
            return number, hang
    return 200, None


@pytest.mark.parametrize(
    ("answers", "progress", "timeout", "looks", "silent"),
    [
        ([{}], [1], 10.0, 10, []),  # alone; the first look only begins
        ([{}], [*range(50), *[50] * 9, *range(51, 60)], 10.0, 77, []),  # progress begins the time anew
        ([None], [1], 0.0, 200, None),  # never
        (SILENT, [1], 10.0, 10, [1]),
        # One that gets on, as in a long save, is waited for as long as it does, half a timeout at a time.
        ([*GETTING_ON, {1: beat(count=99, progress=19)}], [1], 10.0, 100, []),
        ([{1: beat()}, {1: beat(count=2), 2: beat()}], [1], 10.0, 15, [1, 2]),  # so is one that was not there before
        ([None], [1], 10.0, 10, []),  # nobody can be asked
    ],
)
def test_it_is_a_hang_after_a_timeout_in_which_no_process_gets_on(
    answers: list[Answer], progress: list[int], timeout: float, looks: int, silent: list[int] | None
) -> None:
    found, hang = looks_until_a_hang(answers, progress, timeout)
    assert (found, None if hang is None else hang.silent) == (looks, silent)
    assert hang is None or (hang.others is None) == (answers == [None])


def test_what_another_has_found_is_a_hang_here_too_with_those_known_to_be_silent() -> None:
    waiting = iter(SILENT)
    detector = HangDetector(lambda: next(waiting))
    for _ in range(7):
        assert detector.update(1.0, 1, 10.0) is None
    hang = detector.describe(5.0)
    assert (hang.seconds, hang.silent) == (6.0, [1])


@pytest.mark.parametrize(
    ("device", "doing", "counts"),
    [("cpu", "starting", True), ("cuda", "starting", True), ("cpu", "training", True), ("cuda", "training", False)],
)
def test_steps_and_bytes_are_progress_and_until_the_first_step_computing_is(
    tmp_path: Path, device: str, doing: str, counts: bool
) -> None:
    """A host that waits for its GPU spins, which is no progress."""
    watched = replace(processes(1), device=torch.device(device))
    watched.activity.turn_to(doing)
    watchdog = Watchdog(GUARD, watched)
    before = watchdog._measure_progress(0.0)
    # In no time at all, anything is computing; in an age, nothing is.
    assert watchdog._measure_progress(0.0) == before + counts
    before = watchdog._measure_progress(1e6)
    watched.activity.end_step(6)
    assert watchdog._measure_progress(1e6) == before + 1
    assert watchdog._measure_progress(1e6) == before + 1
    (tmp_path / "file").write_bytes(b"0" * (2 << 20))
    assert watchdog._measure_progress(1e6) == before + 2


# What is said


@pytest.mark.parametrize(
    ("ranks", "others", "silent", "named"),
    [
        # Silent, never heard from, doing something else.
        (7, {1: beat(), 2: beat(doing="data"), 3: beat(step=4), 4: beat(), 5: beat()}, [3], [3, 6, 2]),
        (2, {1: beat(doing="checkpoint")}, [], [0, 1]),
        (2, {1: beat()}, [], []),
        (2, None, [], [0]),  # the rank that answers for all
        (300, {rank: beat(step=4 if rank < 100 else 5) for rank in range(1, 300)}, [], [*range(1, MOST_NAMED + 1)]),
    ],
)
def test_those_that_stand_out_are_named(
    ranks: int, others: dict[int, Heartbeat] | None, silent: list[int], named: list[int]
) -> None:
    first, *found, last = describe(Hang(61.0, others, silent), processes(ranks)).splitlines()
    assert first.startswith("error: rank 0: ") and "61 s" in first and "--hang_timeout" in last
    assert [int(rank) for rank in re.findall(r"rank (\d+)", "\n".join(found))] == named


# The watchdog itself


def test_one_that_finds_a_hang_tells_the_others_which_end_with_it(
    single_process: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not as lost connections, in the order in which processes end."""
    monkeypatch.setattr(watchdog_module, "_bytes_moved", lambda: 0)
    ended = {0: threading.Event(), 1: threading.Event()}
    patient = replace(GUARD, hang_timeout=seconds(1e6), first_step_timeout=seconds(1e6))
    monkeypatch.setattr(watchdog_module, "LONGEST_PERIOD_SECONDS", 0.05)
    monkeypatch.setattr(watchdog_module, "COMPUTING_SHARE", 1e9)  # of the threads of this test
    made = {0: Watchdog(GUARD, processes(2, 0), lambda code: ended[0].set())}
    made[1] = Watchdog(patient, processes(2, 1), lambda code: ended[1].set())
    with made[1], made[0]:
        assert ended[1].wait(PATIENCE_SECONDS)
        made[0]._stopped.set()
        made[1]._stopped.set()
        for watchdog in made.values():
            for thread in watchdog._threads:
                thread.join(PATIENCE_SECONDS)
            watchdog._hung_seconds = 0.0
    text = capfd.readouterr().err
    assert "error: rank 1: the job hangs" in text and "_which_end_with_it" in text  # where the main thread is


def test_it_is_heard_of_by_others_and_its_threads_end_before_what_comes_after_it(single_process: None) -> None:
    before, other = set(threading.enumerate()), Heartbeats(1, 2)
    assert other.read_others() == {}
    until = time.monotonic() + PATIENCE_SECONDS
    with Watchdog(GuardConfig(), processes(2)):
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"watchdog", "heartbeat"}
        while not (heard := other.read_others()) and time.monotonic() < until:
            pass
    assert heard and (heard[0].step, heard[0].doing) == (5, "training")
    assert set(threading.enumerate()) == before


def test_a_thread_that_the_store_blocks_does_not_keep_a_run_from_its_end(
    single_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "STORE_TIMEOUT_SECONDS", 0.05)
    release = threading.Event()
    monkeypatch.setattr(Heartbeats, "publish", lambda *_: release.wait())
    with Watchdog(GuardConfig(), processes(2)):
        pass
    release.set()


def test_both_timeouts_at_zero_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    with Watchdog(replace(GUARD, hang_timeout=seconds(0), first_step_timeout=seconds(0)), processes(2)):
        pass


def test_collectives_give_up_after_the_watchdog() -> None:
    assert collective_timeout(GUARD) == COLLECTIVE_TIMEOUT
    patient = replace(GUARD, hang_timeout=seconds(7200))
    assert collective_timeout(patient) == timedelta(hours=2, minutes=10)
    assert collective_timeout(GuardConfig()) > timedelta(seconds=float(GuardConfig().first_step_timeout.amount))


# Signs of life


def test_a_store_that_blocks_is_given_up(single_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "STORE_TIMEOUT_SECONDS", 0.05)
    told = Heartbeats(0, 2)
    release = threading.Event()
    stuck: Any = release.wait
    monkeypatch.setattr(told, "_read", stuck)
    assert told.read_others() is None
    release.set()
