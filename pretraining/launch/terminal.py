r"""Messages for people go through Python's `logging`; here is where they are shown.

    log = logging.getLogger(__name__)      in every module that has something to say
    log.info(…)       shown by rank 0 alone, on stdout, above the live line where there is one
    log.warning(…)    shown by every rank, on stderr, with the rank in front

Results that a command was asked for (a table, a JSON line) are printed, not logged. Names and generated text may hold
control characters, which would steer the terminal: `print_text` and the log write them as `\x1b`.

A run of days outlives those who read what it prints: `outlive_readers` makes output that cannot be written no error.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PACKAGE = "pretraining"

STDIN, STDOUT, STDERR = 0, 1, 2
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Output(io.FileIO):
    """Standard output or standard error; what cannot be written is lost, and of stdout this is said once on stderr."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._says = descriptor == STDOUT

    def write(self, content: ReadableBuffer) -> int:
        """Write as much as goes in; the rest of what a reader does not take counts as written, too."""
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError as error:  # its reader has gone, its disk is full, its terminal was closed
            if self._says:
                with suppress(OSError):
                    line = f"standard output cannot be written ({error.strerror}): training goes on, reports are in "
                    os.write(STDERR, f"{line}the run's logs\n".encode())
            self._says = False
            return size
        return size if written is None else written  # None: it may not block, and would


def outlive_readers() -> None:
    """Make what this process prints from now on no reason to end if nobody can read it.

    Leaves alone a `sys.stdout` or `sys.stderr` that somebody has put in place of the process's own.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by whoever started the process: the next file would get its number, and its output
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lasting(sys.stdout, STDOUT)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lasting(sys.stderr, STDERR)


def _lasting(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:  # otherwise it was closed at the start of the process
        with suppress(OSError):
            stream.flush()
    output = io.BufferedWriter(_Output(descriptor))
    return io.TextIOWrapper(output, getattr(stream, "encoding", None), "backslashreplace", line_buffering=True)


def is_watched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a person sees standard output as it is written, on a terminal.

    Open MPI gives its processes terminals of their own, whatever becomes of what they write.
    """
    if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def escape_controls(text: str) -> str:
    r"""Return a text with its control characters as `\x1b`; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_text(text: str = "", **options: Any) -> None:
    """Print a text that may hold names or generated text; `options` are those of `print`."""
    print(escape_controls(text), **options)


def _print_line(line: str) -> None:
    print(line, flush=True)


class TerminalHandler(logging.Handler):
    """Shows what the package logs; rank 0 shows messages of level INFO for all."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self.rank = rank
        self.show: Callable[[str], None] = _print_line

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        try:
            text = escape_controls(record.getMessage())
            if record.levelno >= logging.WARNING:
                print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
            else:
                self.show(text)
        except Exception as error:
            is_of_stdout = isinstance(error, OSError) and record.levelno < logging.WARNING
            if is_of_stdout or isinstance(error, BrokenPipeError):
                raise  # its reader has gone, as `head` does, or its disk is full: the program ends
            self.handleError(record)


def log_to_terminal(rank: int = 0) -> TerminalHandler:
    """Show the package's messages on this process's terminal; a second call replaces the first."""
    logger = logging.getLogger(PACKAGE)
    for handler in [each for each in logger.handlers if isinstance(each, TerminalHandler)]:
        logger.removeHandler(handler)
    handler = TerminalHandler(rank)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


@contextmanager
def logging_to_terminal(rank: int = 0) -> Iterator[None]:
    """Show the package's messages for the time of a `with` block, as `log_to_terminal` does until the process ends."""
    logger = logging.getLogger(PACKAGE)
    handlers, level = list(logger.handlers), logger.level
    log_to_terminal(rank)
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@contextmanager
def showing_through(show: Callable[[str], None]) -> Iterator[None]:
    """For the time of a `with` block, hand lines of level INFO to `show`, which prints them above a live line."""
    handlers = [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, TerminalHandler)]
    for handler in handlers:
        handler.show = show
    try:
        yield
    finally:
        for handler in handlers:
            handler.show = _print_line
