"""What the threads of a process share: work in order, and a bounded memory of what was used last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Generator[Result, None, None]:
    """Return what `map` returns, made on threads, at most two results for each of them ahead; without threads, here.

    What a call raises, a `SystemExit` too, is raised when its result is due. The threads are daemons and are not waited
    for: one that hangs keeps neither the caller nor the end of the program waiting.
    """
    if not threads:
        yield from map(function, items)
        return
    calls: SimpleQueue[tuple[Item, Future[Result]] | None] = SimpleQueue()
    for _ in range(threads):
        Thread(target=_work, args=(function, calls), name="map", daemon=True).start()
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(Future())
            calls.put((item, waiting[-1]))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            calls.put(None)


def _work(function: Callable[[Item], Result], calls: SimpleQueue[tuple[Item, Future[Result]] | None]) -> None:
    while (call := calls.get()) is not None:
        item, future = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(item))
            except BaseException as error:
                future.set_exception(error)
        del call, item, future  # a result is not kept until the next call


class RecentlyUsed(Generic[Value]):
    """Values up to a total cost; past it, those that were not used for longest go first, never the newest.

    Values must be pure functions of their keys: two threads that miss at once both make the value.
    """

    def __init__(self, limit: int, cost: Callable[[Value], int]) -> None:
        self._limit = limit
        self._cost = cost
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()
        self.total_cost = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key, made if it is not there."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self.total_cost += self._cost(value)
                while self.total_cost > self._limit and len(self._values) > 1:
                    _, dropped = self._values.popitem(last=False)
                    self.total_cost -= self._cost(dropped)
        return value

    def __len__(self) -> int:
        return len(self._values)
