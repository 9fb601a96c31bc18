"""Files that reports and events are appended to while a run trains, whatever the disk does meanwhile."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MOST_WAITING = 20_000
"""Reports that wait in memory for a disk or a service: about 10 MB."""


class ReportFile:
    """A file of records, each whole or not there; a record that finds no room waits until there is some."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque()
        self._lost = 0

    def append(self, record: bytes) -> None:
        """Append a record behind those that wait.

        Raises:
            OSError: it waits, too; the error names the file.
        """
        self._waiting.append(record)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def close(self) -> None:
        """Close the file; an OSError if records still find no room, which are lost then."""
        with self._file:
            self._write_waiting()

    @property
    def lacks(self) -> int:
        """Return how many records are not in the file."""
        return self._lost + len(self._waiting)

    def _write_waiting(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            while self._waiting:
                left = self._waiting[0]
                while left:
                    left = left[self._file.write(left) :]
                end += len(self._waiting.popleft())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None


class JsonLineFile(ReportFile):
    """One JSON object per line, with the step and the time of day.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append a line; raises as `append`."""
        self.append(json.dumps({"step": step, "time": written_time(self._clock()), **values}).encode() + b"\n")


def written_time(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as `2026-11-21T14:30:05Z`: in UTC, as jq's `fromdate` reads it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
