"""The exit of a program: with its own exit code, after all output is written, without Python's shutdown.

    command returns or raises --> exit code --> atexit handlers --> stdout and stderr flushed --> os._exit

Python's shutdown runs while threads of libraries (gloo, NCCL, Arrow) are still active. A thread that then asks for
Python's lock aborts the process ("terminate called without an active exception", exit code 134 after a finished run),
and a thread that never returns keeps it forever. So the exit waits for no thread; code that starts a thread joins it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from pretraining.launch.signals import INTERRUPTED

FAILED = 1


def run_as_program(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit: 0 if it returns, the code of a SystemExit, or a traceback and 1 (130 after Ctrl-C)."""
    code = _exit_code_of(command)
    atexit._run_exitfuncs()  # prints an exception in a handler, and continues with the next handler
    if not _flush_output():
        code = code or FAILED
    os._exit(code)


def _exit_code_of(command: Callable[[], object]) -> int:
    try:
        command()
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return (ending.code or 0) & 0xFF
        print(ending.code, file=sys.stderr)
        return FAILED
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return 0


def _flush_output() -> bool:
    """Flush stdout and stderr, and return whether all output was written. A closed pipe prints no error."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # a program may be started without them
            continue
        try:
            stream.flush()
        except OSError as error:
            is_written = False
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                with suppress(OSError):
                    os.write(2, f"error: the output cannot be written: {error}\n".encode())
    ctypes.CDLL(None).fflush(None)  # C libraries have their own buffers
    return is_written
