"""A folder that appears complete or not at all: written beside its name, flushed, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
