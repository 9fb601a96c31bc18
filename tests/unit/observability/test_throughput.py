from __future__ import annotations

from pretraining.observability.throughput import Stopwatch


class Clock:
    """A clock that only moves on request."""

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
    for _ in stopwatch.watch((clock.wait(1) for _ in range(3)), "data"):
        clock.wait(10)
    assert stopwatch.lap() == (33, {"data": 3})
