from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pretraining.progress import Progress, TrainState
from pretraining.train.garbage import GarbageCollection


class Cycle:
    """An object that only the collector can free."""

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
    """The steps after which a cycle of that step is gone."""
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


def test_between_collections_python_collects_nothing_and_what_was_there_before_is_not_looked_at() -> None:
    with GarbageCollection(10):
        assert not gc.isenabled() and gc.get_freeze_count() > 1000
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_collector_is_restored_when_an_error_ends_the_loop() -> None:
    with pytest.raises(KeyError), GarbageCollection(10):
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with GarbageCollection(10):
        pass
    assert not gc.isenabled()


def test_zero_leaves_python_alone() -> None:
    with GarbageCollection(0) as garbage:
        assert gc.isenabled() and gc.get_freeze_count() == 0
        garbage.after_step(TrainState(1, 1, 1, Progress(0, 0)))
