"""The prefetcher: threads make the batches of the next steps, so training waits neither for a disk nor for a store.

    step numbers --BatchReader.read, on threads, in order--> batches --next(prefetcher)--> training
    data in a store: a step is located `STEPS` steps before it is read --parts that this process lacks--> threads fetch

A fetch that fails is left to the reader, which tries again and raises the error.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from pretraining.data.batch_reader import BatchReader, Located
from pretraining.data.storage.document_reader import Fetch
from pretraining.object_store import REQUESTS, exit_without_waiting

if TYPE_CHECKING:
    from pretraining.data.batch import StepBatch

CLOSING_SECONDS = 1.0
STEPS = 8
"""Steps whose data is fetched before it is read."""


class Prefetcher:
    """An iterator over the batches of steps, which are read ahead. `close` ends its threads.

    Args:
        threads: that read, at most two batches each ahead; 0 = the calling thread reads.
    """

    def __init__(self, reader: BatchReader, steps: Iterable[int], threads: int) -> None:
        def read(step: int | Located) -> StepBatch | BaseException:
            try:
                return reader.read(step)
            except BaseException as error:  # torchdata would replace it by a text, and hang on a SystemExit
                return error

        tasks, stop = SimpleQueue[Fetch | None](), threading.Event()
        source = _fetch_ahead(reader, steps, tasks) if reader.is_remote else steps
        self._pipeline: list[Any] = [map(read, source)]
        if threads:
            # Imported here: commands that only list samples, such as `inspect`, need neither torchdata nor torch.
            from torchdata.nodes import IterableWrapper, ParallelMapper

            # One thread keeps the order by itself. The pipeline's state is never used, so it takes no snapshots.
            wrapped, in_order = IterableWrapper(source), threads > 1
            self._pipeline = [ParallelMapper(wrapped, read, threads, in_order, method="thread", snapshot_frequency=0)]
        # Not a pool of concurrent.futures, which would wait for an answer of a store at the exit of Python.
        fetchers = [
            threading.Thread(target=_fetch, args=(tasks, stop), name=f"fetch-{number}", daemon=True)
            for number in range(REQUESTS if reader.is_remote else 0)
        ]
        for thread in fetchers:
            thread.start()
        # The pipeline's destructor stops its threads. A loader that was never closed does this before Python exits.
        self.close = weakref.finalize(self, _close, self._pipeline, tasks, stop, fetchers)

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> StepBatch:
        """Return the next batch, or raise the error of the thread that read it."""
        batch: StepBatch | BaseException = next(self._pipeline[0])
        if isinstance(batch, BaseException):
            raise batch
        return batch


def _fetch_ahead(
    reader: BatchReader, steps: Iterable[int], tasks: SimpleQueue[Fetch | None]
) -> Iterator[int | Located]:
    """Yield steps, located if they can be, each after the fetches of the next `STEPS` steps were queued."""
    ahead = deque[int | Located]()
    for step in steps:
        ahead.append(step)
        with suppress(Exception):  # the reader meets the same error
            located = reader.locate(step)
            for fetch in reader.fetches(located):
                tasks.put(fetch)
            ahead[-1] = located
        if len(ahead) > STEPS:
            yield ahead.popleft()
    yield from ahead


def _fetch(tasks: SimpleQueue[Fetch | None], stop: threading.Event) -> None:
    while (fetch := tasks.get()) is not None and not stop.is_set():
        with suppress(Exception):  # the reader meets the same error
            fetch()


def _close(
    pipeline: list[Any], tasks: SimpleQueue[Fetch | None], stop: threading.Event, fetchers: list[threading.Thread]
) -> None:
    """End the threads. One that waits for an answer of a store ends with it; Python's exit does not wait."""
    pipeline.clear()
    stop.set()
    for _ in fetchers:
        tasks.put(None)
    deadline = monotonic() + CLOSING_SECONDS
    for thread in fetchers:
        thread.join(max(0.0, deadline - monotonic()))
    if any(thread.is_alive() for thread in fetchers):
        exit_without_waiting()
