"""Where the time goes, and how much of the device's arithmetic the training uses.

MFU (model FLOPs utilisation; Chowdhery et al., 2022, appendix B) = model FLOPs a second / peak FLOPs a second. HFU
(hardware FLOPs utilisation) also counts what activation checkpointing computes again. The peak is the vendor's dense
bfloat16 figure without sparsity, whatever precision the run computes in; `--dry_run` and the line of a benchmark name
it. A CPU has no such figure: `pretrain doctor` measures what it reaches.
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
    """Return what a device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_bytes(device: torch.device) -> int:
    """Return the most that this process had in use at once; on a CPU everything that it held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Stopwatch:
    """Counts the seconds of a run by what they are spent on; what nothing else claims is training.

    Args:
        clock: seconds since any moment.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._listeners: list[Callable[[str], None]] = []
        self._started = self._lap_started = clock()
        self.overall_training_seconds = 0.0  # in all finished laps
        self._spent: dict[str, float] = {}  # by name, since the last lap

    def also_tell(self, listener: Callable[[str], None]) -> None:
        """Add a listener, which is told what begins: a name, or "training" again when it ends."""
        self._listeners.append(listener)

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._started

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as spent on `name`."""
        began = self._clock()
        self._tell(name)
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + self._clock() - began
            self._tell("training")

    def _tell(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)

    def watch(self, items: Iterable[T], name: str) -> Iterator[T]:
        """Pass items on; the time that each `next` takes counts as spent on `name`."""
        iterator = iter(items)
        while True:
            with self.measure(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def restart(self) -> None:
        """Begin the first lap now; what was spent before belongs to none."""
        self._lap_started = self._clock()
        self._spent = {}

    def lap(self) -> tuple[float, dict[str, float]]:
        """End a lap; return its seconds of training, waiting for data included, and the seconds spent by name."""
        now = self._clock()
        spent, self._spent = self._spent, {}
        elsewhere = sum(seconds for name, seconds in spent.items() if name != "data")
        training = now - self._lap_started - elsewhere
        self._lap_started = now
        self.overall_training_seconds += training
        return training, spent
