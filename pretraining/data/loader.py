"""The loader: one `StepBatch` a training step, for ever, for one rank.

    numbers of steps --BatchReader.read, on num_workers threads, in order--> batches --next(loader)--> training

A `BatchReader` makes the batch of any step, and the pipeline of `torchdata.nodes` only fetches ahead. The loader's
whole state is the number of batches that were taken, so batches are the same for any number of threads and stops.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from pretraining.data.batch_reader import BatchReader
from pretraining.data.resume import Resumption, resume, state_at

if TYPE_CHECKING:
    from pretraining.data.batch import StepBatch


class Loader:
    """Iterates over the steps of a run. A context manager that ends its threads; it can be used again after that.

    Args:
        order: what the order of the data depends on (`describe_order`), in a run that begins now.
        num_workers: threads that read ahead; 0 = read when asked.
        limit_steps: steps from the first one to the end; None = never end.
        changes: which files changed when a dataset was last indexed, by dataset; for error messages.
    """

    def __init__(
        self,
        reader: BatchReader,
        order: Mapping[str, Any],
        *,
        num_workers: int = 0,
        limit_steps: int | None = None,
        changes: Mapping[str, str] | None = None,
    ) -> None:
        self.reader = reader
        self._new_run = Resumption(0, reader.mixture, dict(order), ())
        self._changes = dict(changes or {})
        self._workers = num_workers
        self._limit = limit_steps
        self._batches: Iterator[StepBatch] | None = None
        self._go_on(self._new_run)

    @property
    def next_step(self) -> int:
        """Number of the step whose batch comes next."""
        return self._next_step

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        """Return the batch of the next step; a DataError where it cannot be read, and asking again retries."""
        if self._batches is None:
            steps = count(self._next_step) if self._limit is None else range(self._next_step, self._limit)
            self._batches = (
                _ReadAhead(self.reader, steps, self._workers) if self._workers else map(self.reader.read, steps)
            )
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._next_step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches that were taken, JSON-able; the same on every rank."""
        return state_at(self._order, self.reader.mixture, self._next_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where a state was taken, on any number of ranks and threads; see `resume`."""
        self._go_on(resume(state, self._new_run.order, self._changes))

    def rewind(self) -> None:
        """Begin again with the first step, as if no state had been loaded."""
        self._go_on(self._new_run)

    def _go_on(self, run: Resumption) -> None:
        self.close()
        self.reader = self.reader.with_mixture(run.mixture)
        self._order, self._next_step = run.order, run.step
        self.changes_at_resume = run.changes  # a line each for the user

    def close(self) -> None:
        """End the threads, and forget what they have read ahead."""
        if isinstance(self._batches, _ReadAhead):
            self._batches.close()
        self._batches = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _ReadAhead:
    """The batches of steps, read on threads: at most two for each thread are under way or wait to be taken."""

    def __init__(self, reader: BatchReader, steps: Iterable[int], threads: int) -> None:
        # Here: what only looks at batches, as `inspect` does, needs neither torchdata nor torch.
        from torchdata.nodes import IterableWrapper, ParallelMapper

        def read(step: int) -> StepBatch | BaseException:
            try:
                return reader.read(step)
            except BaseException as error:  # torchdata would raise a text in its place, and hang on a SystemExit
                return error

        # One thread keeps the order by itself. No snapshots: the pipeline's own state is never asked for.
        in_order, wrapped = threads > 1, IterableWrapper(steps)
        pipeline = [ParallelMapper(wrapped, read, threads, in_order, method="thread", snapshot_frequency=0)]
        self._pipeline = pipeline
        # Its destructor ends the threads. For a loader that is left open this runs before the interpreter's end.
        self.close = weakref.finalize(self, pipeline.clear)

    def __iter__(self) -> _ReadAhead:
        return self

    def __next__(self) -> StepBatch:
        """Return the next batch; what reading it raised, a thread's `SystemExit` too, is raised here."""
        batch: StepBatch | BaseException = next(self._pipeline[0])
        if isinstance(batch, BaseException):
            raise batch
        return batch
