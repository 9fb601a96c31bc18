"""How a program ends: with its own exit code, once everything is written, and without the interpreter's end.

    command returns or raises --> exit code --> atexit handlers --> stdout and stderr flushed --> os._exit

Python takes itself apart at its end while threads of libraries (gloo's, NCCL's, Arrow's) still run. One that then wants
Python's lock aborts ("terminate called without an active exception", exit code 134 of a run that is finished), and one
that never ends keeps the process for ever. So threads are not waited for; code that starts one joins it.
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
_handlers_may_wait = False


def skip_exit_handlers() -> None:
    """Have this program end without the exit handlers of libraries, one of which would wait for what never comes."""
    global _handlers_may_wait
    _handlers_may_wait = True


def run_as_program(command: Callable[[], object]) -> NoReturn:
    """Run a command as all that this process is for, and end the process with its exit code.

    The command returns (exit code 0), or raises SystemExit, or something else, whose traceback is printed.
    """
    code = _exit_code_of(command)
    if not _handlers_may_wait:
        atexit._run_exitfuncs()  # prints what goes wrong in a handler, and goes on with the next one
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
    """Write out what is buffered, and return whether all of it has arrived. A reader that has gone is no error."""
    arrived = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # a program may be started without
            continue
        try:
            stream.flush()
        except OSError as error:
            arrived = False
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                with suppress(OSError):
                    os.write(2, f"error: the output cannot be written: {error}\n".encode())
    ctypes.CDLL(None).fflush(None)  # what libraries have printed is in buffers of their own
    return arrived
