"""The loader: an endless iterator of one rank's `StepBatch` per training step.

    step numbers --Prefetcher, num_workers threads--> batches --next(loader)--> training

The `BatchReader` makes the batch of any step; the `Prefetcher` only reads ahead. The position of the loader is the
number of consumed batches, so batches do not depend on the number of threads or of resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from pretraining.data.batch_reader import BatchReader
from pretraining.data.prefetcher import Prefetcher
from pretraining.data.resume import RunOrder, resume
from pretraining.data.sampling.mixture import Range

if TYPE_CHECKING:
    from pretraining.data.batch import StepBatch


class Loader:
    """An iterator over the batches of a run. As a context manager it stops its threads; it can then be used again.

    Args:
        order: `describe_order` of a new run; None = the reader's mixture alone, without a state.
        num_workers: prefetch threads; 0 = read in the calling thread.
        limit_steps: steps until the loader stops; None = it never stops.
        changes: by dataset, the files that changed before it was last indexed, for error messages.
    """

    def __init__(
        self,
        reader: BatchReader,
        order: Mapping[str, Any] | None,
        *,
        num_workers: int = 0,
        limit_steps: int | None = None,
        changes: Mapping[str, str] | None = None,
    ) -> None:
        self.reader = reader
        self._new_run = RunOrder.first(order) if order is not None else RunOrder(0, reader.mixture, {})
        self._order = dict(order or {})
        self._changes = dict(changes or {})
        self._workers = num_workers
        self._limit = limit_steps
        self._batches: Prefetcher | None = None
        self._start(self._new_run)

    @property
    def next_step(self) -> int:
        """Step of the next batch."""
        return self._next_step

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        """Return the batch of the next step. After a DataError, the next call retries the same step."""
        if self._batches is None:
            steps = count(self._next_step) if self._limit is None else range(self._next_step, self._limit)
            self._batches = Prefetcher(self.reader, steps, self._workers)
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._next_step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the consumed batches, as JSON values; it is the same on every rank."""
        return self._run.state(self._next_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks and threads; see `resume`."""
        self._start(resume(state, self._order, self._changes))

    def skip(self, numbers: Mapping[str, Iterable[Range]]) -> None:
        """Skip samples from the next step on, by their numbers within datasets (`Mixture.numbers`)."""
        self._start(self._run.skip(numbers))

    def rewind(self) -> None:
        """Restart at the first step, as if no state had been loaded."""
        self._start(self._new_run)

    def _start(self, run: RunOrder) -> None:
        self.close()
        self.reader = self.reader.with_mixture(run.mixture)
        self._run, self._next_step = run, run.step
        self.changes_at_resume = run.changes

    def close(self) -> None:
        """Stop the threads and drop prefetched batches."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
