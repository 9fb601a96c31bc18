"""Agreement between hosts while devices compute, and detection of waiting threads.

All ranks must make the same decisions, such as a save after 30 minutes, or a stop that only one rank was asked for. So
decisions cannot depend on a local clock or signal. `DelayedMinimum` is an all-reduce of small host values, offered
after one step and read after the next. It runs on CPU tensors during the step, so neither host nor device waits.

`is_waiting` tells whether the main thread waits: its innermost Python function is a collective of `torch.distributed`,
or `wait_for` or `wait_for_device`, which this project's own code waits through.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class HostValues:
    """Values that all ranks share: the clock of the rank that started last, the largest stop request (0 = none)."""

    seconds: float
    stop: int


class DelayedMinimum:
    """A minimum over ranks whose result is read one call later, so that no rank waits for another."""

    def __init__(self) -> None:
        self._pending: tuple[Any, torch.Tensor] | None = None

    def offer(self, *values: float) -> list[float] | None:
        """Offer this rank's values; return the minima of the previous call, None on the first call.

        A single process has the same delay, so it decides at the same steps as many processes.
        """
        offered = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(offered, op=dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        least = self.forget()
        self._pending = (work, offered)
        return least

    def forget(self) -> list[float] | None:
        """Start over; return the minima of the last offer, if any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, least = pending
        if work is not None:
            wait_for(work)
        return [float(value) for value in least]


class HostSync:
    """A clock and a stop request that all ranks share, as a context around the loop."""

    def __init__(self) -> None:
        self._minimum = DelayedMinimum()

    def __enter__(self) -> HostSync:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:  # after an error the other ranks may never answer
            self._minimum.forget()

    def exchange(self, seconds: float, stop: int) -> HostValues:
        """Offer this rank's clock and stop request; return the shared values of the previous call (first call: zeros).

        All ranks must call this equally often: after each step, and during longer work.

        Args:
            seconds: time since the start on this rank's clock.
            stop: this rank's stop request; 0 = none.
        """
        least, negative_stop = self._minimum.offer(seconds, -stop) or (0.0, 0.0)
        return HostValues(least, -int(negative_stop))


def wait_for(work: Any) -> None:
    """Wait for a collective."""
    work.wait()


def wait_for_device(event: torch.cuda.Event) -> None:
    """Wait until the device has reached an event."""
    event.synchronize()


_COLLECTIVES = dist.distributed_c10d.__file__
_WAIT_FUNCTIONS = {function.__code__ for function in (wait_for, wait_for_device)}


def is_waiting(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits for other processes or for the device."""
    return frame.f_code in _WAIT_FUNCTIONS or frame.f_code.co_filename == _COLLECTIVES
