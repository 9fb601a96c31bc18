"""A folder that appears complete or not at all: written beside its name, flushed, then renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pretraining.errors import CheckpointError


@contextmanager
def written_aside(folder: Path, flag: str, needed_bytes: int) -> Iterator[Path]:
    """Give a folder to write into, which takes the name `folder` when the block ends without an error.

    Args:
        folder: the name; nothing but an empty folder may be there.
        flag: how the user gave it, for messages.
        needed_bytes: about how much will be written.

    Raises:
        CheckpointError: something is there already, or it cannot be written; then nothing is left behind.
    """
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{flag}: {folder} is there already. Remove it, or give another name")
        if temporary.exists():  # of a process that was killed
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed_bytes:
            raise CheckpointError(
                f"{flag}: {folder} would take {needed_bytes:,} bytes, and {free:,} are free there. Make room, or give "
                "another place"
            )
        yield temporary
        _flush(temporary)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        _flush(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{flag}: {folder} cannot be written ({error.strerror or error}); it takes {needed_bytes:,} bytes. Check "
            "space and permissions there, or give another place"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file, flushed to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """A rename is durable when the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# TODO(merge): was pretraining.files
# Trying again where a file system stumbles: a network or disk error that may be gone a second later.

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
