from __future__ import annotations

import errno
import os

import pytest

from pretraining.files import PAUSES_SECONDS, with_retries


class Flaky:
    """Fails a number of times, then works."""

    def __init__(self, times: int, number: int) -> None:
        self.left, self.number, self.calls = times, number, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.left:
            raise OSError(self.number, os.strerror(self.number))
        return "done"


def test_what_passes_is_tried_again_with_longer_pauses() -> None:
    said: list[str] = []
    pauses: list[float] = []
    flaky = Flaky(2, errno.EIO)
    assert with_retries(flaky, "writing a", said.append, pauses.append) == "done"
    assert flaky.calls == 3 and pauses == [0.5, 1.0]
    assert said[0] == "writing a failed (Input/output error): try 2 of 5 in 0.5 s"


def test_it_ends_with_the_error() -> None:
    pauses: list[float] = []
    flaky = Flaky(9, errno.ESTALE)
    with pytest.raises(OSError, match="Stale"):
        with_retries(flaky, "", lambda line: None, pauses.append)
    assert flaky.calls == 5 and pauses == list(PAUSES_SECONDS)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT])
def test_what_does_not_pass_is_not_tried_again(number: int) -> None:
    flaky = Flaky(9, number)
    with pytest.raises(OSError):
        with_retries(flaky, "", lambda line: None)
    assert flaky.calls == 1
