"""Messages for people go through Python's `logging`; here is where they are shown.

    log = logging.getLogger(__name__)      in every module that has something to say
    log.info(…)       shown by rank 0 alone, on stdout, above the live line where there is one
    log.warning(…)    shown by every rank, on stderr, with the rank in front

Results that a command was asked for (a table, a JSON line) are printed, not logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PACKAGE = "pretraining"


def _print_line(line: str) -> None:
    print(line, flush=True)


class TerminalHandler(logging.Handler):
    """Shows what the package logs; rank 0 shows messages of level INFO for all."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO if rank == 0 else logging.WARNING)
        self.rank = rank
        self.show: Callable[[str], None] = _print_line

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one message."""
        try:
            text = record.getMessage()
            if record.levelno >= logging.WARNING:
                print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
            else:
                self.show(text)
        except BrokenPipeError:  # of a reader that has gone, as `head` does: the program ends quietly
            raise
        except Exception:
            self.handleError(record)


def log_to_terminal(rank: int = 0) -> TerminalHandler:
    """Shows the package's messages on this process's terminal; a second call replaces the first."""
    logger = logging.getLogger(PACKAGE)
    for handler in [each for each in logger.handlers if isinstance(each, TerminalHandler)]:
        logger.removeHandler(handler)
    handler = TerminalHandler(rank)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler


@contextmanager
def showing_through(show: Callable[[str], None]) -> Iterator[None]:
    """For the time of a `with` block, hands lines of level INFO to `show`, which prints them above a live line."""
    handlers = [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, TerminalHandler)]
    for handler in handlers:
        handler.show = show
    try:
        yield
    finally:
        for handler in handlers:
            handler.show = _print_line
