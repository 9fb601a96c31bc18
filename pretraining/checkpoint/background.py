"""A save that runs in a thread while the training goes on, at most one at a time.

    training thread   start -> step, poll -> step, poll -> ... -> `poll` says done, or raises what went wrong
    saving thread     write, commit, talking to the other ranks over a process group of its own

Ranks must take note of the end at the same step: one that leaves the loop alone would leave the others waiting in a
collective. So while a save is under way, each `poll` offers whether this rank's thread has ended and reads what all had
offered a step ago; nobody waits for anybody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pretraining.parallel.processes import COLLECTIVE_TIMEOUT, on_every_rank


class BackgroundSave:
    """One thread for saves; its methods are collective calls, but for `settle`."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._offer: tuple[Any, torch.Tensor] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a save was started whose end nobody took note of yet; the same on every rank."""
        return self._thread is not None

    def start(self, save: Callable[[dist.ProcessGroup], None]) -> None:
        """Run `save`, which gets the group to talk over; there must be none under way."""
        assert self._thread is None and self._group is not None

        def run() -> None:
            try:
                save(self._group)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Whether the save under way has ended on every rank; call it once a step.

        Raises:
            CheckpointError: it has failed, on every rank alike; once.
        """
        if self._thread is None:
            return False
        ended = torch.tensor([not self._thread.is_alive()], dtype=torch.int32)
        work = dist.all_reduce(ended, op=dist.ReduceOp.MIN, async_op=True) if dist.get_world_size() > 1 else None
        offered, self._offer = self._offer, (work, ended)
        if offered is None or not _all_ended(offered):
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the end of the save under way, if any.

        Raises:
            CheckpointError: it has failed, on every rank alike.
        """
        if self._thread is None:
            return
        if self._offer is not None:
            _all_ended(self._offer)
        self._thread.join()
        self._thread = self._offer = None
        on_every_rank(self._raise_failure)

    def settle(self) -> BaseException | None:
        """Let the save under way come to its end after an error in the training; returns what went wrong with it, too.

        Other ranks may be gone, so nothing is agreed on.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = self._offer = None
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """Leave the group of processes."""
        assert self._thread is None
        dist.destroy_process_group(self._group)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _all_ended(offer: tuple[Any, torch.Tensor]) -> bool:
    work, ended = offer
    if work is not None:
        work.wait()
    return bool(ended)
