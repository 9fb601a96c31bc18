"""Helpers for threads: an ordered parallel map and a bounded cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Generator[Result, None, None]:
    """Map a function over items in order on threads, at most two results per thread ahead."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="map")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


class RecentlyUsed(Generic[Value]):
    """A thread-safe LRU cache with a limit on the total cost. The newest value always stays.

    Values must be pure functions of their keys: two threads that miss at once both make the value.
    """

    def __init__(self, limit: float, cost: Callable[[Value], float]) -> None:
        self._limit = limit
        self._cost = cost
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()
        self.total_cost = 0.0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key; make it if it is missing."""
        known = self.find(key)
        if known is not None:
            return known
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self.total_cost += self._cost(value)
                while self.total_cost > self._limit and len(self._values) > 1:
                    _, dropped = self._values.popitem(last=False)
                    self.total_cost -= self._cost(dropped)
        return value

    def find(self, key: Hashable) -> Value | None:
        """Return the value of a key, if it is there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def drop(self, key: Hashable) -> None:
        """Forget a value, if it is there."""
        with self._lock:
            if key in self._values:
                self.total_cost -= self._cost(self._values.pop(key))

    def peek(self, key: Hashable) -> Value | None:
        """Return the value of a key, if it is there, without counting this as a use."""
        return self._values.get(key)

    def __len__(self) -> int:
        return len(self._values)
