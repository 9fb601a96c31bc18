"""Trying again where a file system stumbles: a network or disk error that may be gone a second later."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)

# Input/output error; the server does not know the file any more; no answer; busy. Not among them: no space, no
# permission, no such file, which the next try would only meet again.
TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}


def with_retries(
    action: Callable[[], T],
    what: str,
    say: Callable[[str], None],
    pause: Callable[[float], None] | None = None,
) -> T:
    """Do something to files, again after a pause where it fails with an error that may pass.

    Args:
        action: what to do; it starts from the beginning each time.
        what: of it, for the lines that say that it is tried again: "writing /a/b".
        say: shows a line.
        pause: waits so many seconds.

    Raises:
        OSError: of the last try, or one that does not pass.
    """
    for number, seconds in enumerate(PAUSES_SECONDS, start=1):
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            say(f"{what} failed ({error.strerror}): try {number + 1} of {len(PAUSES_SECONDS) + 1} in {seconds:g} s")
        (pause or time.sleep)(seconds)
    return action()
