"""What the hosts agree on while the devices work, and where they wait.

Decisions that every rank must take alike (a save after so many minutes, an early end that one rank was told) cannot
come from a local clock or signal. `DelayedMinimum` is an all-reduce of small host values that are offered after one
step and read after the next. It runs on CPU tensors beside the step, so neither host nor device waits for it.

`is_waiting` tells whether the main thread waits: its innermost Python function is one of `torch.distributed` that calls
into a collective, or `wait_for` or `wait_for_device`, through which this project's own code waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class HostValues:
    """What all ranks know alike: the clock of the rank that started last, the largest request to stop (0 = none)."""

    seconds: float
    stop: int


class DelayedMinimum:
    """The least of the values that all ranks offer, known at the next offer: no rank waits for another."""

    def __init__(self) -> None:
        self._pending: tuple[Any, torch.Tensor] | None = None

    def offer(self, *values: float) -> list[float] | None:
        """Offer this rank's values; return the least of each of the call before, None at the first call.

        One process communicates nothing but has the same delay, so it decides at the same steps as many.
        """
        offered = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(offered, op=dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        least = self.forget()
        self._pending = (work, offered)
        return least

    def forget(self) -> list[float] | None:
        """Begin again; return the least of the values offered last, if any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, least = pending
        if work is not None:
            wait_for(work)
        return [float(value) for value in least]


class HostSync:
    """A clock and a request to end that all ranks read alike, as a context around the loop."""

    def __init__(self) -> None:
        self._agreement = DelayedMinimum()

    def __enter__(self) -> HostSync:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:  # after an error the other ranks may never answer
            self._agreement.forget()

    def exchange(self, seconds: float, stop: int) -> HostValues:
        """Offer this rank's clock and request to stop; returns what all ranks offered at the call before.

        Every rank calls it equally often: after each step, and inside what takes longer than one. The first call
        returns zeros.

        Args:
            seconds: since the start, on this rank's clock.
            stop: this rank's request, above 0, or 0.
        """
        least, negative_stop = self._agreement.offer(seconds, -stop) or (0.0, 0.0)
        return HostValues(least, -int(negative_stop))


def wait_for(work: Any) -> None:
    """Wait for a collective."""
    work.wait()


def wait_for_device(event: torch.cuda.Event) -> None:
    """Wait until the device has reached an event."""
    event.synchronize()


_COLLECTIVES = dist.distributed_c10d.__file__
_OWN = {function.__code__ for function in (wait_for, wait_for_device)}


def is_waiting(frame: FrameType) -> bool:
    """Return whether a thread with this innermost frame waits for other processes or for the device."""
    return frame.f_code in _OWN or frame.f_code.co_filename == _COLLECTIVES
