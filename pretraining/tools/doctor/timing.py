"""How long something takes, on a device that works behind the host's back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5
BUDGET_SECONDS = 0.3
MOST_CALLS = 2**14


def seconds_of(function: Callable[[], object], device: torch.device, together: bool = False) -> float:
    """Seconds of a call: the median of a few stretches of calls that take `BUDGET_SECONDS`, about.

    The median, not the best: a device that is slow now and then is slow in training.

    Args:
        function: what to call.
        device: that it works on; waited for at the end of each stretch.
        together: all ranks measure at once and make the same number of calls, as collectives need.
    """
    calls = _calls_of_a_stretch(function, device, together)
    return statistics.median(_stretch(function, device, calls) for _ in range(REPEATS)) / calls


def _calls_of_a_stretch(function: Callable[[], object], device: torch.device, together: bool) -> int:
    """As many as its part of the budget allows, found by doubling: that brings caches, buffers and clocks up, too."""
    function()  # chooses algorithms, makes buffers and connections
    calls = 1
    while calls < MOST_CALLS:
        seconds = _stretch(function, device, calls)
        if (_slowest(seconds) if together else seconds) > BUDGET_SECONDS / REPEATS / 2:
            break
        calls *= 2
    return calls


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


def _slowest(seconds: float) -> float:
    everyone = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.item()
