"""Signal handlers, installed when a process starts.

    PREEMPTION_SIGNALS  recorded; training checks between steps, saves and stops (train/preemption.py)
    SIGINT (Ctrl-C)     while torch is imported: exit with one line; in the training loop: the first one is recorded
                        like the others, the next one raises KeyboardInterrupt; elsewhere: KeyboardInterrupt

A handler that only records cannot interrupt a save. By default these signals kill a process at once, so the handlers
are installed before torch is imported, which takes seconds. A signal that the process ignores when it starts stays
ignored, in workers and in scripts/torchrun.py: `nohup` ignores SIGHUP, and shells ignore SIGINT in background jobs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pretraining.launch.layout import LAUNCHERS

OUT_OF_TIME = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals of schedulers ahead of a time limit: SLURM, submitit, SGE, HTCondor, and a limit of CPU seconds."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGHUP, *OUT_OF_TIME)
"""Signals that make a run save and stop; scripts/train.sh and train.slurm list them, too."""
EMBEDDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU)
"""Those that a `Trainer` records in another program, which may use SIGHUP and SIGUSR2 itself."""
INTERRUPTED = 130  # what shells report for SIGINT
TIME_IS_OVER = "PRETRAINING_TIME_IS_OVER"  # names a file that scripts/torchrun.py watches for
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RANKS = tuple(launcher.variables[0] for launcher in LAUNCHERS)
"""Variables with the rank of this process, the innermost launcher's first."""


def heeded(numbers: Iterable[signal.Signals] = PREEMPTION_SIGNALS) -> tuple[signal.Signals, ...]:
    """Return the signals that this process does not ignore."""
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


class ReceivedSignals:
    """The first signal to this process that requests a stop, or None. The first one of each kind prints a line."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._named: set[int] = set()
        self._listens = False

    def listen(self, numbers: Iterable[signal.Signals] | None = None) -> ReceivedSignals:
        """Record signals until the process exits, so that a late signal does not kill it during its exit.

        Args:
            numbers: None = all that the process does not ignore.
        """
        for number in heeded() if numbers is None else numbers:
            signal.signal(number, self._record)
        self._listens = True
        return self

    @contextmanager
    def listening(self, numbers: Iterable[signal.Signals] = EMBEDDED_SIGNALS) -> Iterator[ReceivedSignals]:
        """Record signals within a `with` block; without effect outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():  # Python allows handlers only there
            yield self
            return
        before = {number: signal.getsignal(number) for number in numbers}
        self.listen(before)
        try:
            yield self
        finally:
            self._listens = False
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python

    @contextmanager
    def recording_interrupts(self) -> Iterator[None]:
        """Within a `with` block, record the first Ctrl-C, too; the next one raises KeyboardInterrupt.

        Without effect if signals are not recorded, or if the process ignores SIGINT, as background jobs of shells do.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._record(number, frame)

        if not self._listens:
            yield
            return
        with _at_interrupt(handle):
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
        if number not in self._named:
            self._named.add(number)
            what = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
            again = "; Ctrl-C again stops it at once" if number == signal.SIGINT else ""
            _print_on_rank_zero(f"\n{what}: the run stops before its next step{again}", os.environ)


@contextmanager
def exit_at_interrupt(text: str, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within a `with` block, exit on Ctrl-C with a line from rank 0 and without a traceback.

    For imports: they may turn a KeyboardInterrupt into another error, or drop it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        _print_on_rank_zero(text, environ)
        os._exit(INTERRUPTED)

    with _at_interrupt(handle):
        yield


def _print_on_rank_zero(text: str, environ: Mapping[str, str]) -> None:
    """Write a line to stderr, without `print`, which the signal may have interrupted."""
    if next((environ[name] for name in _RANKS if name in environ), "0") == "0":
        with suppress(OSError):  # stderr is closed
            os.write(2, f"{text}\n".encode())


@contextmanager
def _at_interrupt(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within a `with` block, call a handler on Ctrl-C, unless SIGINT has a handler already or is ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def terminate_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Ask Linux to send SIGTERM when the torchrun that started this process dies, even by SIGKILL.

    torchrun's processes have their own sessions, and would otherwise keep training.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        terminate_with_parent()


def mark_time_limit(environ: Mapping[str, str] = os.environ) -> None:
    """Create the file by which scripts/torchrun.py knows that the time limit was reached, and does not restart."""
    if path := environ.get(TIME_IS_OVER):
        with suppress(OSError):  # without the file, a restart stops at once
            Path(path).touch()


def terminate_with_parent() -> None:
    """Ask Linux to send SIGTERM when the process that started this one dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
