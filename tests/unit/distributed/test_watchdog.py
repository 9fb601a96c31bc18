from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE_SECONDS

from pretraining.config.training import GuardConfig
from pretraining.distributed import watchdog as watchdog_module
from pretraining.distributed.processes import COLLECTIVE_TIMEOUT, Processes
from pretraining.distributed.watchdog import (
    MOST_NAMED,
    HangDetector,
    Heartbeat,
    Heartbeats,
    Watchdog,
    collective_timeout,
    describe,
)
from pretraining.durations import Duration


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


# Detection


Answer = dict[int, Heartbeat] | None
GETTING_ON: list[Answer] = [{1: beat(count, progress=count)} for count in range(1, 20)]
SILENT: list[Answer] = [{1: beat(count=3), 2: beat(count=4)}, {1: beat(count=3), 2: beat(count=9)}]


@pytest.mark.parametrize(
    ("answers", "progress", "timeout", "looks"),
    [
        ([{}], [1], 10.0, 10),  # a single process; the first update only starts the clock
        ([{}], [*range(50), *[50] * 9, *range(51, 60)], 10.0, 77),  # progress restarts the clock
        ([None], [1], 0.0, 200),  # never
        (SILENT, [1], 10.0, 10),
        # The watchdog waits while another process makes progress, as in a long save, half a timeout at a time.
        ([*GETTING_ON, {1: beat(count=99, progress=19)}], [1], 10.0, 100),
        ([{1: beat()}, {1: beat(count=2), 2: beat()}], [1], 10.0, 15),  # a process without earlier heartbeat
        ([None], [1], 10.0, 10),  # the store does not answer
    ],
)
def test_a_hang_is_a_time_without_progress(
    answers: list[Answer], progress: list[int], timeout: float, looks: int
) -> None:
    """Update every second, at most 200 times; the last progress and the last answer stay."""
    waiting = iter(answers)
    detector = HangDetector(lambda: next(waiting, answers[-1]))
    for number in range(200):
        if detector.update(1.0, progress[min(number, len(progress) - 1)], timeout):
            break
    else:
        number = 200
    assert number == looks


@pytest.mark.parametrize(
    ("device", "doing", "counts"),
    [("cpu", "starting", True), ("cuda", "starting", True), ("cpu", "training", True), ("cuda", "training", False)],
)
def test_steps_bytes_and_first_cpu_time_are_progress(tmp_path: Path, device: str, doing: str, counts: bool) -> None:
    """A host that waits for its GPU spins, which does not count as progress."""
    watched = replace(processes(1), device=torch.device(device))
    watched.activity.turn_to(doing)
    watchdog = Watchdog(GUARD, watched)
    before = watchdog._measure_progress(0.0)
    # Relative to no time, any CPU time is enough; relative to a very long time, none is.
    assert watchdog._measure_progress(0.0) == before + counts
    before = watchdog._measure_progress(1e6)
    watched.activity.end_step(6)
    assert watchdog._measure_progress(1e6) == before + 1
    assert watchdog._measure_progress(1e6) == before + 1
    (tmp_path / "file").write_bytes(b"0" * (2 << 20))
    assert watchdog._measure_progress(1e6) == before + 2


# Messages


@pytest.mark.parametrize(
    ("ranks", "others", "silent", "named"),
    [
        # Silent, without any heartbeat, doing something else.
        (7, {1: beat(), 2: beat(doing="data"), 3: beat(step=4), 4: beat(), 5: beat()}, [3], [3, 6, 2]),
        (2, {1: beat(doing="checkpoint")}, [], [0, 1]),
        (2, {1: beat()}, [], []),
        (2, None, [], [0]),  # the rank with the store
        (300, {rank: beat(step=4 if rank < 100 else 5) for rank in range(1, 300)}, [], [*range(1, MOST_NAMED + 1)]),
    ],
)
def test_outliers_are_named(
    ranks: int, others: dict[int, Heartbeat] | None, silent: list[int], named: list[int]
) -> None:
    earlier = {rank: replace(each, count=1 if rank in silent else 0) for rank, each in (others or {}).items()}
    first, *found, last = describe(61.0, earlier, others, processes(ranks)).splitlines()
    assert first.startswith("error: rank 0: ") and "61 s" in first and "--hang_timeout" in last
    assert [int(rank) for rank in re.findall(r"rank (\d+)", "\n".join(found))] == named


# The watchdog


def test_a_process_that_finds_a_hang_stops_the_others(
    single_process: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not as lost connections, whatever the order of exits."""
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
    assert "error: rank 1: the job hangs" in text and "_stops_the_others" in text  # in the stack of the main thread


def test_others_read_the_heartbeat_and_the_threads_stop_before_the_block_ends(single_process: None) -> None:
    before, other = set(threading.enumerate()), Heartbeats(1, 2)
    assert other.read_others() == {}
    until = time.monotonic() + PATIENCE_SECONDS
    with Watchdog(GuardConfig(), processes(2)):
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"watchdog", "heartbeat"}
        while not (heard := other.read_others()) and time.monotonic() < until:
            pass
    assert heard and (heard[0].step, heard[0].doing) == (5, "training")
    assert set(threading.enumerate()) == before


def test_a_thread_blocked_by_the_store_blocks_no_exit(single_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "STORE_TIMEOUT_SECONDS", 0.05)
    release = threading.Event()
    for name in ("publish", "_read"):
        monkeypatch.setattr(Heartbeats, name, lambda *_: release.wait())
    with Watchdog(GuardConfig(), processes(2)):
        assert Heartbeats(0, 2).read_others() is None
    release.set()


def test_both_timeouts_at_zero_start_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "Thread", None)
    with Watchdog(replace(GUARD, hang_timeout=seconds(0), first_step_timeout=seconds(0)), processes(2)):
        pass


def test_collectives_time_out_after_the_watchdog() -> None:
    assert collective_timeout(GUARD) == COLLECTIVE_TIMEOUT
    patient = replace(GUARD, hang_timeout=seconds(7200))
    assert collective_timeout(patient) == timedelta(hours=2, minutes=10)
    assert collective_timeout(GuardConfig()) > timedelta(seconds=float(GuardConfig().first_step_timeout.amount))
