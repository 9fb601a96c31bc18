r"""The terminal output: log messages, results of commands, and what happens when output cannot be written.

    log = logging.getLogger(__name__)      in every module that logs
    log.info(…)       printed by rank 0 only, on stdout, above the live line if there is one
    log.warning(…)    printed by every rank, on stderr, with the rank in front

Results of a command (a table, a JSON line) are printed, not logged. Names and generated text may contain control
characters that change the terminal, so `print_text` and the log print these as `\x1b`.

A run of days may lose its terminal. After `ignore_output_errors`, output that cannot be written is no error.
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


class _LossyOutput(io.FileIO):
    """Standard output or error that drops output instead of failing; stderr reports the first loss of stdout."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._reports_loss = descriptor == STDOUT

    def write(self, content: ReadableBuffer) -> int:
        """Write the content; after an error all of it counts as written."""
        size = memoryview(content).nbytes
        try:
            written = super().write(content)
        except OSError as error:  # closed pipe, full disk, closed terminal
            if self._reports_loss:
                with suppress(OSError):
                    line = f"standard output cannot be written ({error.strerror}): training continues, reports are in "
                    os.write(STDERR, f"{line}the run's logs\n".encode())
            self._reports_loss = False
            return size
        return size if written is None else written  # None: a non-blocking pipe is full


def ignore_output_errors() -> None:
    """Make errors of stdout and stderr harmless for this process from now on.

    A `sys.stdout` or `sys.stderr` that was replaced stays as it is.
    """
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:  # it was closed at the start: the next file to open would get its number, and the output
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lossy_stream(sys.stdout, STDOUT)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy_stream(sys.stderr, STDERR)


def _lossy_stream(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None:  # None: it was closed at the start of the process
        with suppress(OSError):
            stream.flush()
    output = io.BufferedWriter(_LossyOutput(descriptor))
    return io.TextIOWrapper(output, getattr(stream, "encoding", None), "backslashreplace", line_buffering=True)


def is_watched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether standard output is a terminal.

    False under Open MPI, which gives its processes terminals that nobody sees.
    """
    if any(name.startswith("OMPI_COMM_WORLD_") for name in environ):
        return False
    return sys.stdout is not None and sys.stdout.isatty()


def escape_controls(text: str) -> str:
    r"""Return a text with control characters written as `\x1b`; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def print_text(text: str = "", **options: Any) -> None:
    """Print a text with names or generated text; `options` are those of `print`."""
    print(escape_controls(text), **options)


def _print_line(line: str) -> None:
    print(line, flush=True)


class TerminalHandler(logging.Handler):
    """Prints the package's log; INFO messages only on rank 0."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self.rank = rank
        self.show: Callable[[str], None] = _print_line

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        try:
            text = escape_controls(record.getMessage())
            if record.levelno >= logging.WARNING:
                print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
            else:
                self.show(text)
        except Exception as error:
            is_stdout_error = isinstance(error, OSError) and record.levelno < logging.WARNING
            if is_stdout_error or isinstance(error, BrokenPipeError):
                raise  # the pipe is closed, as by `head`, or the disk is full: the program exits
            self.handleError(record)


def log_to_terminal(rank: int = 0) -> TerminalHandler:
    """Print the package's log on this process's terminal; a second call replaces the first."""
    logger = logging.getLogger(PACKAGE)
    for handler in [each for each in logger.handlers if isinstance(each, TerminalHandler)]:
        logger.removeHandler(handler)
    handler = TerminalHandler(rank)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


@contextmanager
def logging_to_terminal(rank: int = 0) -> Iterator[None]:
    """Print the package's log on this process's terminal within a `with` block."""
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
    """Within a `with` block, pass INFO messages to `show`, which prints them above a live line."""
    handlers = [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, TerminalHandler)]
    for handler in handlers:
        handler.show = show
    try:
        yield
    finally:
        for handler in handlers:
            handler.show = _print_line
