"""The one way to write a file or a folder: complete or not at all, and durable.

    content -> .<name>.tmp beside its place -> fsync -> rename -> fsync of the folder

A reader, and a process that starts after a kill or a power failure, sees the old content or the new one, never a part.
Where a file system stumbles for a moment, `with_retries` tries again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pretraining.errors import CheckpointError, DataError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
CHECKSUM = "checksum"
CHECKSUM_BYTES = 2**20  # read at once for a checksum: fits a core's cache

TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
"""I/O error, stale handle of a network file system, no answer, busy: gone a second later, perhaps. A full disk, missing
permission and a missing file are not among them: the next try would meet them again."""


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file that appears complete or not at all, and survives a power failure.

    A path has one writer at a time; what a killed one leaves, the next one replaces. After an error, what was there
    before is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_flushed(temporary, content)
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_flushed(path: Path, content: str | bytes) -> None:
    """Writes a file in place and flushes it to disk: for folders that are renamed as a whole once they are complete."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def file_checksum(path: Path) -> tuple[str, int]:
    """CRC-32 of a file's bytes, eight hexadecimal digits, and the number of bytes."""
    checksum = size = 0
    buffer = memoryview(bytearray(CHECKSUM_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return f"{checksum:08x}", size


def link_atomic(link: Path, target: str) -> None:
    """Makes a symbolic link that replaces one of the same name at once; an error leaves that one as it was."""
    temporary = link.with_name(f"{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    flush_folder(link.parent)


def write_json(path: Path, document: Any) -> None:
    """Writes a JSON file in place, flushed to disk."""
    write_flushed(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with their CRC-32 as one more, by which `checked_values` finds a flipped bit."""
    return {**values, CHECKSUM: _checksum_of(values)}


def checked_values(document: Any) -> dict[str, Any]:
    """Returns the values of a JSON object without their checksum; files of earlier versions have none.

    Raises:
        ValueError: it is no object, or its values are not those that the checksum is of.
    """
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    values = {name: value for name, value in document.items() if name != CHECKSUM}
    if CHECKSUM in document and document[CHECKSUM] != _checksum_of(values):
        raise ValueError("the content does not have the checksum that stands in it")
    return values


def _checksum_of(values: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def flush_folder(folder: Path) -> None:
    """Makes the names in a folder durable: a rename is on disk only once the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path, flag: str, needed_bytes: int) -> Iterator[Path]:
    """Gives a folder to write into, which takes the name `folder` when the block ends without an error.

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
        flush_folder(temporary)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        flush_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{flag}: {folder} cannot be written ({error.strerror or error}); it takes {needed_bytes:,} bytes. Check "
            "space and permissions there, or give another place"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def run_not_writable(run: Path, error: OSError) -> CheckpointError:
    """Makes the error for users whose run's folder cannot be written."""
    return CheckpointError(
        f"--ckpt_save_path={run} cannot be written: {error}. Give a folder that this user may write."
    )


@contextmanager
def output_errors(root: Path) -> Iterator[None]:
    """Turns what the file system says about --output_path into an error for users; the input's errors say their own."""
    try:
        yield
    except BrokenPipeError:  # of a reader of what is shown, not of a file
        raise
    except OSError as error:
        raise DataError(
            f"{error.filename or root} cannot be written: {error.strerror or error}. Make room, give write permission "
            "or give another --output_path"
        ) from error


def with_retries(action: Callable[[], T], what: str) -> T:
    """Does something to files, and again after a pause where it fails with an error that may pass.

    Args:
        action: starts from the beginning each time.
        what: for the warning that it is tried again: "writing /a/b".

    Raises:
        OSError: of the last try, or one that does not pass.
    """
    for number, seconds in enumerate(PAUSES_SECONDS, start=1):
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            tries = f"try {number + 1} of {len(PAUSES_SECONDS) + 1} in {seconds:g} s"
            log.warning("%s failed (%s): %s", what, error.strerror, tries)
        time.sleep(seconds)
    return action()
