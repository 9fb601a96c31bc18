"""Work on threads, in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pretraining.data.threads import map_in_order


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_keep_the_order_and_never_run_far_ahead(threads: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for item in range(40):
            taken += 1
            yield item

    for done, result in enumerate(map_in_order(lambda item: item * item, items(), threads)):
        assert result == done**2
        assert taken <= done + 2 * threads + 1


def test_an_error_on_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 1 // item, [1, 0, 1], 2))
