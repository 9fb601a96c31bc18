"""What this process does about signals, from its start.

    SIGTERM, SIGUSR1    remembered, no more: training looks between steps, saves and ends (train/preemption.py)
    SIGINT (Ctrl-C)     KeyboardInterrupt, as always in Python; during imports one line and the end; in the training
                        loop the first one is remembered like the others, and the next one is a KeyboardInterrupt

A handler that only remembers cannot interrupt a save half-way. By default either signal would end a process on the
spot, so they are listened to before torch is imported, which takes seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 130  # what shells report for a process that SIGINT ended
TIME_IS_OVER = "PRETRAINING_TIME_IS_OVER"  # a path, of scripts/torchrun.py
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ReceivedSignals:
    """The first of the signals that ask for an early end that has come to this process, if one has."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._listens = False

    def listen(self) -> ReceivedSignals:
        """Remember signals from now on until the process ends, so that a late one does not kill it on its way out."""
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, self._remember)
        self._listens = True
        return self

    @contextmanager
    def listening(self) -> Iterator[ReceivedSignals]:
        """Remember signals for the time of a `with` block; hears nothing outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers there alone
            yield self
            return
        before = {number: signal.getsignal(number) for number in PREEMPTION_SIGNALS}
        self.listen()
        try:
            yield self
        finally:
            self._listens = False
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's

    @contextmanager
    def remembering_interrupts(self, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
        """For the time of a `with` block, the first Ctrl-C is remembered as well; the next one interrupts.

        Only where signals are listened to at all. What a shell starts in the background ignores SIGINT, and goes on so.
        """

        def come(number: int, frame: FrameType | None) -> None:
            self._remember(number, frame)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _say("\ninterrupted: the run ends after this step; Ctrl-C again ends it at once", environ)

        if not self._listens:
            yield
            return
        with _at_interrupt(come):
            yield

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)


@contextmanager
def leave_at_interrupt(text: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """For the time of a `with` block, Ctrl-C ends the process at once, with a line from rank 0 and no traceback.

    For imports: a KeyboardInterrupt inside them may come out as any error, or not at all.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        _say(text, environ)
        os._exit(INTERRUPTED)

    with _at_interrupt(leave):
        yield


def _say(text: str, environ: Mapping[str, str]) -> None:
    """Print a line of rank 0; a handler of a signal may interrupt Python's own printing."""
    if environ.get("RANK", "0") == "0":
        with suppress(OSError):  # nobody reads it
            os.write(2, f"{text}\n".encode())


@contextmanager
def _at_interrupt(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """For the time of a `with` block, Ctrl-C calls a handler, unless it means something else already."""
    # What a shell starts in the background ignores SIGINT, and shall go on doing so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Ask Linux for a SIGTERM when the torchrun that started this process dies, even by SIGKILL.

    torchrun's processes are in sessions of their own: without this they would train on, unseen.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        end_with_parent()


def tell_launcher_that_time_is_over(environ: Mapping[str, str] = os.environ) -> None:
    """Leave a note for scripts/torchrun.py, which then starts nothing again, also where machines come and go."""
    if path := environ.get(TIME_IS_OVER):
        with suppress(OSError):  # it only saves starts that would end at once
            Path(path).touch()


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the process that started this one dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
