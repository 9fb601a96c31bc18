"""Threads that fetch the data of the next steps from object stores, so that training does not wait for answers.

    read(step):  locate the steps up to step + `STEPS` --what this process lacks--> threads that fetch
                 the step, located before --BatchReader.read--> its batch

A fetch that fails is left to the reader, which tries again and raises the error.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING

from pretraining.data.batch_reader import BatchReader, Located
from pretraining.data.storage.document_reader import Fetch
from pretraining.errors import PretrainError
from pretraining.object_store import REQUESTS, exit_without_waiting

if TYPE_CHECKING:
    from pretraining.data.batch import StepBatch

CLOSING_SECONDS = 1.0
STEPS = 8
"""Steps whose data is fetched before it is read."""


class FetchAhead:
    """A thread-safe reader of consecutive steps that fetches their data in advance. `close` ends its threads.

    Args:
        first, limit: steps to read, [first, limit); None = without an end.
    """

    def __init__(self, reader: BatchReader, first: int, limit: int | None) -> None:
        self._reader, self._next, self._limit = reader, first, limit
        self._located: dict[int, Located] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._tasks: SimpleQueue[Fetch | None] = SimpleQueue()
        # Not a pool of concurrent.futures, which would wait for an answer of a store at the exit of Python.
        self._threads = [
            threading.Thread(target=self._fetch, name=f"fetch-{number}", daemon=True) for number in range(REQUESTS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, step: int) -> StepBatch:
        """Read a step, as the reader does."""
        with self._lock:
            end = step + STEPS + 1
            for number in range(self._next, end if self._limit is None else min(end, self._limit)):
                self._next = number + 1
                with suppress(PretrainError):  # the reader meets the same error
                    self._located[number] = located = self._reader.locate(number)
                    for fetch in self._reader.fetches(located):
                        self._tasks.put(fetch)
            found = self._located.pop(step, step)
        return self._reader.read(found)

    def close(self) -> None:
        """End the threads. One that waits for an answer of a store ends with it; Python's exit does not wait."""
        self._stop.set()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            exit_without_waiting()

    def _fetch(self) -> None:
        while (fetch := self._tasks.get()) is not None and not self._stop.is_set():
            with suppress(Exception):  # the reader meets the same error
                fetch()
