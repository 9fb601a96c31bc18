"""The loader: one `StepBatch` a training step, for ever, for one rank.

Batches are made by a `BatchReader`, which knows no past. The loader only counts the batches that were taken, and lets
threads read a few steps ahead; so its state never depends on what was fetched, and any number of threads gives the same
batches in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from pretraining.data.batch import StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.resume import resume, state_at


class Loader:
    """Iterates over the steps of a run.

    A context manager that ends its threads; it can be used again after that.

    Args:
        reader: makes the batch of any step.
        order: what the order of the data depends on (`describe_order`), in a run that begins now.
        num_workers: threads that read ahead; 0 = read when asked.
        limit_steps: end after so many steps from the first; None = never end.
        changes: which files changed when a dataset was last indexed, by dataset; for error messages.

    Attributes:
        reader: as given; after a resume, with the phases of the whole run.
        changes_at_resume: how the data changed at the last resume, a line each for the user.
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
        self.reader = self._reader_of_new_run = reader
        self._order = self._order_of_new_run = dict(order)
        self.changes_at_resume: tuple[str, ...] = ()
        self._changes = dict(changes or {})
        self._workers = num_workers
        self._limit = limit_steps
        self._next_step = 0
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[StepBatch]] = deque()

    @property
    def next_step(self) -> int:
        """Number of the step whose batch comes next."""
        return self._next_step

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> StepBatch:
        """The batch of the next step.

        Raises:
            DataError: a sample cannot be read. Whatever a thread raises is raised here, once its step comes; asking
                again tries again.
        """
        if self._limit is not None and self._next_step >= self._limit:
            raise StopIteration
        if self._workers == 0:
            batch = self.reader.read(self._next_step)
        else:
            self._read_ahead()
            try:
                batch = self._ahead.popleft().result()
            except BaseException:
                self._drop_ahead()
                raise
        self._next_step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that were taken, JSON-able; the same on every rank."""
        return state_at(self._order, self.reader.mixture, self._next_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, on any number of ranks and threads.

        Where weights, datasets or global batch size are other than at the state's end, a new phase begins.

        Raises:
            DataError: the state is of another order of the data.
        """
        resumed = resume(state, self._order_of_new_run, self._changes)
        self._drop_ahead()
        self.reader = self._reader_of_new_run.with_mixture(resumed.mixture)
        self._order, self._next_step, self.changes_at_resume = resumed.order, resumed.step, resumed.changes

    def rewind(self) -> None:
        """Begin again with the first step, as if no state had been loaded."""
        self._drop_ahead()
        self.reader, self._order = self._reader_of_new_run, self._order_of_new_run
        self._next_step, self.changes_at_resume = 0, ()

    def close(self) -> None:
        """End the threads."""
        self._drop_ahead()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self) -> None:
        """Keep a step under way for every thread, and one more."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="data")
        while len(self._ahead) <= self._workers:
            step = self._next_step + len(self._ahead)
            if self._limit is not None and step >= self._limit:
                break
            self._ahead.append(self._pool.submit(self.reader.read, step))

    def _drop_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
