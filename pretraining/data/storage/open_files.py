"""Token files that are open for reading by position, on a disk.

`preadv` reads straight into a batch. Files are not mapped, so a truncated file is an error, not a crash. Threads share
open files, whose number is bounded.
"""

from __future__ import annotations

import os
import resource
import weakref
from typing import Any

from pretraining.data.threads import RecentlyUsed
from pretraining.errors import DataError
from pretraining.files import check_regular


class OpenFile:
    """A file opened for reading by position, closed with the last reference to it."""

    def __init__(self, path: str, size: int, ending: bytes = b"") -> None:
        """Open a token file; raise a DataError if it is missing, or has another size or a wrong ending."""
        self.path = path
        try:
            check_regular(path)
            self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still read at exit
            size_now = os.fstat(self.descriptor).st_size
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror}", path=path) from error
        if size_now != size:
            raise DataError(f"changed since the job began: it had {size:,} bytes and now has {size_now:,}", path=path)
        tail = bytearray(len(ending))
        OpenFile.read_into(self, memoryview(tail), size - len(tail))  # subclasses count from elsewhere
        if tail != ending:
            raise DataError("damaged: it lacks the ending of files of its format", path=path)

    def part(self, begin: int, end: int) -> OpenFile:
        """Return what reads bytes [begin, end)."""
        return self

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file; raise a DataError if it is unreadable or too short."""
        while len(target):
            try:
                count = os.preadv(self.descriptor, [target], offset)
            except OSError as error:
                raise DataError(f"cannot be read at byte {offset:,}: {error.strerror}", path=self.path) from error
            if count == 0:
                end = os.fstat(self.descriptor).st_size
                raise DataError(f"truncated: it ends at byte {end:,}, before its documents do", path=self.path)
            target, offset = target[count:], offset + count


def open_files(limit: int | None = None) -> RecentlyUsed[Any]:
    """Make a cache of open files; the default limit is half of the process's limit, at most 4096."""
    return RecentlyUsed(share_of_open_files(2) if limit is None else limit, cost=lambda _: 1)


def share_of_open_files(part: int) -> int:
    """Return one of `part` equal shares of the files that this process may open, between 16 and 4096."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // part))
