"""Garbage collection at fixed steps, the same on all ranks.

By default Python collects when enough new objects exist: at a different step on each rank, while the others wait. So
this module turns the collector off, excludes all objects from before the first step, and collects after the same steps
on all ranks. Collecting is necessary, since reference cycles may hold tensors and so device memory.
"""

from __future__ import annotations

import gc

from pretraining.progress import TrainState


class GarbageCollection:
    """Schedule of garbage collections, as a context around the loop.

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
        """Collect if a collection is due."""
        if self._interval_steps and state.progress.steps % self._interval_steps == 0:
            gc.collect()
