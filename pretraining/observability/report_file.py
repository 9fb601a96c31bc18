"""Where reports and events go while a run trains, whatever disks and services do meanwhile.

a report --> Sink, which keeps it until its place takes it --> a file, a tracker
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretraining.files import check_regular, exists
from pretraining.text import count_of

log = logging.getLogger(__name__)

Report = tuple[int, dict[str, Any], float]
"""Step, values, and when it was handed over, in seconds since 1970."""
MOST_WAITING = 20_000
"""Reports that wait in memory for a disk or a service: about 10 MB."""


class Sink:
    """Hands reports to one place, in order. Its failures are warnings: one when they begin, one line when they end.

    An OSError says that the place is away (a full disk, a server). Its report waits, and the next one tries again.
    After another error the report is lost.

    Args:
        name: of the place, for errors that name no file.
        write: takes step and values of a report, and when it was handed over, in seconds since 1970.
        close: of the place.
    """

    def __init__(
        self, name: str, write: Callable[[int, dict[str, Any], float], object], close: Callable[[], object]
    ) -> None:
        self.name = name
        self._write, self._close = write, close
        self._waiting: deque[Report] = deque()
        self._lost = 0
        self._is_failing = False

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hand over a report."""
        self.put((step, values, time.time()))

    def put(self, report: Report) -> None:
        """Hand over a report behind those that wait; the oldest one is lost if there are too many."""
        self._waiting.append(report)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._send()

    def close(self) -> None:
        """Close the place; a failure must not hide how the run ended."""
        self._send()
        try:
            self._close()
        except (Exception, SystemExit) as error:
            self._warn(error)
        if lacks := self._lost + len(self._waiting):
            log.warning("%s lacks %s", self.name, count_of(lacks, "report"))

    def _send(self) -> None:
        while self._waiting:
            try:
                self._write(*self._waiting[0])
            except OSError as error:
                self._warn(error)
                return
            except (Exception, SystemExit) as error:  # Python ends a thread at a SystemExit without a word
                self._warn(error)
                self._lost += 1
            else:
                if self._is_failing:
                    lacks = f"; it lacks {count_of(self._lost, 'report')}" if self._lost else ""
                    log.info("%s can be written again%s", self.name, lacks)
                self._is_failing = False
            self._waiting.popleft()

    def _warn(self, error: BaseException) -> None:
        if not self._is_failing:
            where = getattr(error, "filename", None) or self.name
            log.warning("%s cannot be written (%s): training goes on", where, describe_failure(error))
        self._is_failing = True


class RecordFile:
    """A file of records, each whole or not there."""

    def __init__(self, path: Path) -> None:
        if exists(path):
            check_regular(path)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Append a record; an OSError names the file."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            while record:
                record = record[self._file.write(record) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_sink(file: RecordFile) -> Sink:
    """Return a sink that appends reports to a file, a JSON object per line."""
    return Sink(str(file.path), lambda *report: file.append(json_line(*report)), file.close)


def json_line(step: int, values: dict[str, Any], seconds: float) -> bytes:
    """Return a report of a moment, in seconds since 1970, as one line of JSON."""
    return json.dumps({"step": step, "time": written_time(seconds), **values}).encode() + b"\n"


def written_time(seconds: float) -> str:
    """Return a moment, in seconds since 1970, as `2026-11-21T14:30:05Z`: in UTC, as jq's `fromdate` reads it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_failure(error: BaseException) -> str:
    """Return what a warning says about an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]
