from __future__ import annotations

import pytest
import torch

from pretraining.observability.throughput import StepTimes, Stopwatch


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> float:
        self.now += seconds
        return self.now


def test_a_lap_is_training_less_what_activities_took_and_with_the_wait_for_data() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    clock.now += 3
    with stopwatch.measure("evaluation"):
        clock.now += 5
    with stopwatch.measure("data"):
        clock.now += 2
    training, spent = stopwatch.lap()
    assert training == 5
    assert spent == {"evaluation": 5, "data": 2}
    clock.now += 4
    assert stopwatch.lap() == (4, {})
    assert stopwatch.overall_training_seconds == 9
    assert stopwatch.elapsed == 14
    with stopwatch.measure("setup"):
        clock.now += 50
    stopwatch.restart()
    clock.now += 2
    assert stopwatch.lap() == (2, {}) and stopwatch.overall_training_seconds == 11 and stopwatch.elapsed == 66


def test_watching_items_books_the_time_that_each_takes() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    for _ in stopwatch.watch((clock.wait(1) for _ in range(3)), "data"):
        clock.wait(10)
    assert stopwatch.lap() == (33, {"data": 3})


def test_a_step_lasts_from_asking_for_its_batch_to_its_update(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    stopwatch = Stopwatch(clock)
    times = StepTimes(torch.device("cpu"), stopwatch)
    for seconds in (2, 3):
        with stopwatch.measure("data"):
            clock.now += 1
        clock.now += seconds
        times.end_step()
        with stopwatch.measure("evaluation"):
            clock.now += 50
    times.read()
    assert times.seconds == [3, 4]


def test_on_a_gpu_events_are_recorded_in_a_step_and_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock.now

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = StepTimes(torch.device("cuda"), Stopwatch(clock))
    clock.now += 2
    times.end_step()
    assert times.seconds == []
    times.read()
    assert times.seconds == [2]
