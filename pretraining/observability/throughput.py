"""Where the time goes, and how much of the device's arithmetic the training uses.

MFU (model FLOPs utilisation; Chowdhery et al., 2022, appendix B) = model FLOPs a second / peak FLOPs a second. HFU
(hardware FLOPs utilisation) also counts what activation checkpointing computes again. The peak is the vendor's dense
bfloat16 figure without sparsity, whatever precision the run computes in; it is always printed beside the MFU. A CPU has
no such figure: `pretrain doctor` measures what it reaches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

# Dense bfloat16 peaks in TFLOP/s of devices whose names match. The first one counts, so longer names stand before
# shorter ones. Where a data sheet names the figure with sparsity, it is halved here.
PEAK_TFLOPS = (
    # NVIDIA: data sheets of HGX B300 and B200, GB300 and GB200 NVL72
    ("B300|B200", 2250.0),
    ("GB300|GB200", 2500.0),
    # NVIDIA: data sheets of GH200, H200, H100, H100 NVL; H800 computes as H100 does, H20 is its smaller sibling
    ("H200 NVL|H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("GH200|H200|H100|H800", 989.4),
    ("H20", 148.0),
    # NVIDIA: data sheets of A100 (A800 computes as it does), A40, A30, A10; AWS and NVIDIA for A10G
    ("A100|A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    # NVIDIA: data sheets of L40S, L40, L4; white papers of the Blackwell, Ada and Ampere GeForce architectures,
    # with accumulation in float32
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    # AMD: data sheets of MI355X, MI350X, MI325X, MI300X, MI250X, MI250, MI210
    ("MI355X", 2500.0),
    ("MI350X", 2300.0),
    ("MI325X|MI300X", 1307.4),
    ("MI250X", 191.5),  # a device is one of the card's two dies
    ("MI250|MI210", 181.0),  # MI250: the same
)


def peak_tflops(device_name: str) -> float | None:
    """Returns the dense bfloat16 peak of a device in TFLOP/s; None where it is not known, as of CPUs."""
    return next((peak for names, peak in PEAK_TFLOPS if re.search(rf"\b({names})\b", device_name)), None)


def device_name(device: torch.device) -> str:
    """Returns what a device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Stopwatch:
    """Counts the seconds of a run by what they are spent on; what nothing else claims is training.

    Args:
        clock: seconds since any moment.
        turn_to: told what begins: a name, or "training" again when it ends.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, turn_to: Callable[[str], None] = lambda name: None
    ) -> None:
        self._clock = clock
        self._listeners = [turn_to]
        self._started = self._lap_started = clock()
        self.overall_training_seconds = 0.0  # in all finished laps
        self._spent: dict[str, float] = {}  # by name, since the last lap

    def also_tell(self, listener: Callable[[str], None]) -> None:
        """Adds a listener, which is told what begins."""
        self._listeners.append(listener)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Counts the time of a `with` block as spent on `name`."""
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
        """Passes items on; the time that each `next` takes counts as spent on `name`."""
        iterator = iter(items)
        while True:
            with self.measure(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def restart(self) -> None:
        """Begins the first lap now; what was spent before belongs to none."""
        self._lap_started = self._clock()
        self._spent = {}

    def lap(self) -> tuple[float, dict[str, float]]:
        """Ends a lap; returns its seconds of training, waiting for data included, and the seconds spent by name."""
        now = self._clock()
        spent, self._spent = self._spent, {}
        elsewhere = sum(seconds for name, seconds in spent.items() if name != "data")
        training = now - self._lap_started - elsewhere
        self._lap_started = now
        self.overall_training_seconds += training
        return training, spent
