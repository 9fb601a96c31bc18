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
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.estimate.costs import flops_per_token, recomputed_flops_per_token
from pretraining.estimate.devices import peak_tflops
from pretraining.progress import Progress, TrainState

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
        self._started = self._restarted = self._lap_started = clock()
        self.overall_training_seconds = 0.0  # in all finished laps
        self._spent: dict[str, float] = {}  # by name, since the last lap

    def add_listener(self, listener: Callable[[str], None]) -> None:
        """Add a function to call with the name of each new activity; after an activity, it is "training" again."""
        self._listeners.append(listener)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def since_restart(self) -> float:
        """Seconds since the first lap began, with evaluations and saves."""
        return self._clock() - self._restarted

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
        self._restarted = self._lap_started = self._clock()
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


class Throughput:
    """Rates, utilisation and memory of training, since the last report and since the start.

    Args:
        start: position of the run at the start of this process.

    Attributes:
        peak_tflops: peak of one device; None = unknown.
    """

    def __init__(
        self, config: TrainConfig, shape: LlamaShape, device: torch.device, stopwatch: Stopwatch, start: Progress
    ) -> None:
        self.stopwatch = stopwatch
        self.peak_tflops = peak_tflops(device_name(device))
        self._shape, self._device, self._seq_length = shape, device, config.data.seq_length
        self._parallel = config.parallel
        self._start = self._reported = start

    def report(self, state: TrainState, span: float) -> dict[str, Any]:
        """Finish a lap, and return its values; a collective call.

        Args:
            span: mean attention span in tokens.
        """
        memory = self._max_memory()
        seconds, spent = self.stopwatch.lap()  # after the all-reduce, which waits for the other processes
        now, gpus = state.progress, dist.get_world_size()
        steps, tokens = now.steps - self._reported.steps, now.tokens - self._reported.tokens
        self._reported = now
        done = now.tokens - self._start.tokens
        rate, overall = tokens / seconds, done / self.stopwatch.overall_training_seconds
        by_clock = done / self.stopwatch.since_restart
        flops = flops_per_token(self._shape, span)
        with_recomputed = flops + recomputed_flops_per_token(self._parallel, self._shape, span)
        return {
            "step_seconds": seconds / steps,
            "samples_per_second": rate / self._seq_length,
            "tokens_per_second_per_gpu": rate / gpus,
            "tokens_per_second_per_gpu_overall": overall / gpus,
            "tokens_per_day": by_clock * 86400,
            "mfu": self._utilisation(flops * rate / gpus),
            "hfu": self._utilisation(with_recomputed * rate / gpus),
            "data_share": spent.get("data", 0.0) / seconds,
            **memory,
            "time_left_seconds": (state.total_steps - now.steps) * tokens / steps / by_clock,
        }

    def _utilisation(self, flops_per_second: float) -> float | None:
        return None if self.peak_tflops is None else flops_per_second / 1e12 / self.peak_tflops

    def _max_memory(self) -> dict[str, float | None]:
        """Return maxima over ranks in GiB: peak, allocated and reserved memory; on a CPU only the process's peak."""
        sizes = [peak_bytes(self._device)]
        if self._device.type == "cuda":
            sizes += [torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)]
        maxima = torch.tensor(sizes, dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        names = ("memory_gib", "memory_allocated_gib", "memory_reserved_gib")
        return dict(zip_longest(names, [size / 2**30 for size in maxima.tolist()]))
