"""What the hosts agree on while the devices work, and where they wait.

Decisions that every rank must take alike (a save after so many minutes, an early end that one rank was told) cannot
come from a local clock or signal. `HostSync` is a delayed all-reduce of small host values: offered after one step, read
after the next. It runs on CPU tensors beside the step, so neither host nor device waits for it.

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


class HostSync:
    """A clock and a request to end that all ranks read alike, as a context around the loop."""

    def __init__(self) -> None:
        self._pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> HostSync:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an error the other ranks may never answer.
        if error is None and self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        self._pending = None

    def exchange(self, seconds: float, stop: int) -> HostValues:
        """Offer this rank's clock and request to stop; returns what all ranks offered at the call before.

        Every rank calls it equally often: after each step, and inside what takes longer than one. The first call
        returns zeros. One process communicates nothing but has the same delay, so it decides at the same steps as many.

        Args:
            seconds: since the start, on this rank's clock.
            stop: this rank's request, above 0, or 0.
        """
        # The least clock is the greatest of the negative ones: one reduction for both.
        offered = torch.tensor([-seconds, stop], dtype=torch.float64)
        work = dist.all_reduce(offered, op=dist.ReduceOp.MAX, async_op=True) if dist.get_world_size() > 1 else None
        previous, self._pending = self._pending, (work, offered)
        if previous is None:
            return HostValues(0.0, 0)
        work, agreed = previous
        if work is not None:
            wait_for(work)
        negative_seconds, stop_agreed = agreed.tolist()
        return HostValues(-negative_seconds, int(stop_agreed))


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
