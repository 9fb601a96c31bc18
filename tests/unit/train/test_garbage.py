from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pretraining.progress import Progress, TrainState
from pretraining.train.garbage import GarbageCollection


class Cycle:
    """Object in a reference cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def collections_at(interval: int, steps: int, restored: int = 0) -> list[int]:
    """Return the steps after which their cycle was collected."""
    state, gone = TrainState(restored + steps, restored + steps, 1, Progress(restored, 0)), []
    with GarbageCollection(interval) as garbage:
        while not state.stopping:
            cycle = weakref.ref(Cycle())
            state.advance(0.0)
            garbage.after_step(state)
            if cycle() is None:
                gone.append(state.step)
    return gone


def test_garbage_is_collected_at_steps_that_depend_on_their_number_alone() -> None:
    assert collections_at(3, 10) == [3, 6, 9]
    assert collections_at(3, 5, restored=4) == [6, 9]


@pytest.mark.parametrize("interval", [0, 10])
@pytest.mark.parametrize("is_on", [True, False])
def test_python_collects_only_on_the_interval_and_an_error_restores_the_collector(is_on: bool, interval: int) -> None:
    (gc.enable if is_on else gc.disable)()
    with pytest.raises(KeyError), GarbageCollection(interval) as garbage:
        assert gc.isenabled() is (is_on and interval == 0)
        assert (gc.get_freeze_count() > 1000) is (interval > 0)
        garbage.after_step(TrainState(1, 1, 1, Progress(0, 0)))
        raise KeyError
    assert gc.isenabled() is is_on and gc.get_freeze_count() == 0
