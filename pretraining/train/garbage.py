"""Keeps Python's garbage collector out of the steps.

The collector looks for cycles of objects whenever so many new ones are there: at another step on each rank, for longer
the more objects are alive, and all ranks wait for the one that it stops. So here it is off, what is alive before the
first step is left out of its search for good, and it runs after steps of the same numbers on all ranks.

It must run at times: cycles may hold tensors, and so memory of the device.
"""

from __future__ import annotations

import gc
from types import TracebackType

from pretraining.progress import TrainState


class GarbageCollection:
    """When Python collects garbage, as a context around the loop.

    Args:
        interval_steps: steps between two collections; 0 = whenever Python wants.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        if self._interval_steps:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._interval_steps:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self, state: TrainState) -> None:
        """Collect if it is time."""
        if self._interval_steps and state.progress.steps % self._interval_steps == 0:
            gc.collect()
