"""Keeps Python's garbage collector out of the steps.

By default the collector runs when enough new objects exist: at a different step on each rank, while the others wait.
So it is off here, what is alive before the first step is excluded for good, and it runs after the same steps on all
ranks. It must run at times: cycles may hold tensors, and so memory of the device.
"""

from __future__ import annotations

import gc

from pretraining.progress import TrainState


class GarbageCollection:
    """Decides when Python collects garbage, as a context around the loop.

    Args:
        interval_steps: steps between two collections; 0 = Python's own default.
    """

    def __init__(self, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self._interval_steps:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._interval_steps:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after_step(self, state: TrainState) -> None:
        """Collect if it is time."""
        if self._interval_steps and state.progress.steps % self._interval_steps == 0:
            gc.collect()
