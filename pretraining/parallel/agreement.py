"""What the hosts agree on while the devices work: small numbers exchanged once a step, read one step later.

Decisions that every rank must take alike (a save after so many minutes) cannot be read from a local clock. The exchange
runs on CPU tensors beside the step, so neither host nor device waits for it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from pretraining.parallel.waiting import wait_for


class Agreement:
    """A clock that all ranks read alike, as a context around the loop."""

    def __init__(self) -> None:
        self._pending: tuple[Any, torch.Tensor] | None = None

    def __enter__(self) -> Agreement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the other ranks may never answer.
        if error is None and self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        self._pending = None

    def seconds(self, elapsed: float) -> float:
        """Tell this rank's clock; get what the slowest-started rank's showed a step ago, the same on every rank.

        Call it once a step on every rank. The first call returns 0. With one process nothing is communicated, and the
        delay of a step is kept, so that one process decides at the same steps as many.
        """
        offered = torch.tensor([elapsed], dtype=torch.float64)
        work = dist.all_reduce(offered, op=dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        previous, self._pending = self._pending, (work, offered)
        if previous is None:
            return 0.0
        work, agreed = previous
        if work is not None:
            wait_for(work)
        return float(agreed)
