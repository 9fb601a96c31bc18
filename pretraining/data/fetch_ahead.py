"""Threads that fetch the data of the next steps from object stores, so that training does not wait for answers.

    step numbers --FetchAhead: locate, fetch on threads--> located steps, `STEPS` behind --BatchReader.read--> batches

A fetch that fails is left to the reader, which tries again and raises the error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic

from pretraining.data.batch_reader import BatchReader, Located
from pretraining.data.storage.document_reader import Fetch
from pretraining.errors import PretrainError
from pretraining.object_store import REQUESTS, exit_without_waiting

CLOSING_SECONDS = 1.0
STEPS = 8
"""Steps whose data is fetched before it is read."""


class FetchAhead:
    """An iterator over located steps, whose data is being fetched. `close` ends the threads without waiting."""

    def __init__(self, reader: BatchReader, steps: Iterable[int]) -> None:
        self._reader, self._steps = reader, iter(steps)
        self._waiting: deque[int | Located] = deque()
        self._tasks: SimpleQueue[Fetch | None] = SimpleQueue()
        self._stop = threading.Event()
        # Not a pool of concurrent.futures, which would wait for an answer of a store at the exit of Python.
        self._threads = [
            threading.Thread(target=self._fetch, name=f"fetch-{number}", daemon=True) for number in range(REQUESTS)
        ]
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[int | Located]:
        return self

    def __next__(self) -> int | Located:
        """Return the next step; its number if it cannot be located: the reader then raises the error."""
        for step in self._steps:
            located: int | Located = step
            with suppress(PretrainError):
                located = self._reader.locate(step)
                for fetch in self._reader.fetches(located):
                    self._tasks.put(fetch)
            self._waiting.append(located)
            if len(self._waiting) > STEPS:
                break
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()

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
            with suppress(PretrainError):
                fetch(self._stop)
