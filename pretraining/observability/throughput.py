"""Time and memory of training on a device.

MFU (model FLOPs utilisation; Chowdhery et al., 2022, appendix B) = model FLOPs per second / peak FLOPs per second. HFU
(hardware FLOPs utilisation) also counts the recomputation of activation checkpointing. The peak is the vendor's dense
bfloat16 figure for any precision; `--dry_run` and benchmarks print it. A CPU has no such figure, but `pretrain doctor`
measures its speed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak of allocated device memory; on a CPU its peak resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stopwatch:
    """A stopwatch that divides the seconds of a run by activity; unmeasured time is training.

    Args:
        clock: a function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._listeners: list[Callable[[str], None]] = []
        self._started = self._lap_started = clock()
        self.overall_training_seconds = 0.0  # in all finished laps
        self._spent: dict[str, float] = {}  # by name, since the last lap

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a function to call with the name of each new activity; after an activity, it is "training" again."""
        self._listeners.append(listener)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as the activity `name`."""
        began = self._clock()
        self._notify(name)
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + self._clock() - began
            self._notify("training")

    def _notify(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    def watch(self, items: Iterable[T], name: str) -> Iterator[T]:
        """Yield items, and count the time of each `next` as the activity `name`."""
        iterator = iter(items)
        while True:
            with self.measure(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def restart(self) -> None:
        """Start the first lap now, and drop the time before."""
        self._lap_started = self._clock()
        self._spent = {}

    def lap(self) -> tuple[float, dict[str, float]]:
        """Finish a lap; return its seconds of training, with waiting for data, and its seconds by activity."""
        now = self._clock()
        spent, self._spent = self._spent, {}
        elsewhere = sum(seconds for name, seconds in spent.items() if name != "data")
        training = now - self._lap_started - elsewhere
        self._lap_started = now
        self.overall_training_seconds += training
        return training, spent
