"""Shared fixtures. Nothing here imports torch, so that tests of torch-free packages stay fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Before any test imports torch: tests are small, and threads of several processes only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """A command that trains listens to signals until its process ends; here, that is until the test does."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
