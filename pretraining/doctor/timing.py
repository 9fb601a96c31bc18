"""How long something takes, on a device that works behind the host's back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5


def seconds_of(
    function: Callable[[], object], device: torch.device, budget_seconds: float = 0.3, calls: int | None = None
) -> float:
    """Seconds of a call: the median of a few stretches of calls, after a first one that does not count.

    Args:
        function: what to call.
        device: that it works on; waited for at the end of each stretch.
        budget_seconds: how long to measure, about.
        calls: in a stretch; None = as many as the budget allows. Collectives need the same number on all ranks.
    """
    function()  # the first call chooses algorithms and makes buffers
    if calls is None:
        once = _stretch(function, device, 1)
        calls = max(1, min(10_000, int(budget_seconds / REPEATS / max(once, 1e-7))))
    return statistics.median(_stretch(function, device, calls) for _ in range(REPEATS)) / calls


def _stretch(function: Callable[[], object], device: torch.device, calls: int) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(calls):
        function()
    wait_for(device)
    return time.perf_counter() - began


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet() -> None:
    """Wait until all ranks are here; over the hosts, so that no device is asked."""
    dist.all_reduce(torch.zeros(1))
