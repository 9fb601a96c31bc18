"""Reports and events on their way to files and trackers, and the reader of these files.

a report --> Sink, which queues it until the write succeeds --> a file or a tracker

`read_lines` leaves out damaged lines.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pretraining.files import check_regular, exists, parse_json
from pretraining.observability.display import TASK
from pretraining.text import count_of

log = logging.getLogger(__name__)

Report = tuple[int, dict[str, Any], float]
"""Step, values, and time of the report in seconds since 1970."""
MAX_PENDING = 20_000
"""Maximum reports in memory, about 10 MB, that wait for a disk or a service."""


class Sink:
    """An ordered queue of reports to one file or tracker. The first of several failures in a row is a warning.

    After an OSError (a full disk, a missing server), the report waits, and the next report retries. After another
    error, the report is lost.

    Args:
        name: name in messages, if an error names no file.
        write: writes a report: step, values and seconds since 1970.
        close: closes the file or tracker.
    """

    def __init__(
        self, name: str, write: Callable[[int, dict[str, Any], float], object], close: Callable[[], object]
    ) -> None:
        self.name = name
        self._write, self._close = write, close
        self._pending: deque[Report] = deque()
        self._lost = 0
        self._is_failing = False

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Write a report, or queue it."""
        self.put((step, values, time.time()))

    def put(self, report: Report) -> None:
        """Write a report after the queued ones; drop the oldest if there are too many."""
        self._pending.append(report)
        if len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._lost += 1
        self._send()

    def close(self) -> None:
        """Write queued reports, and close the file or tracker; failures are warnings."""
        self._send()
        try:
            self._close()
        except (Exception, SystemExit) as error:
            self._warn(error)
        if lacks := self._lost + len(self._pending):
            log.warning("%s lacks %s", self.name, count_of(lacks, "report"))

    def _send(self) -> None:
        while self._pending:
            try:
                self._write(*self._pending[0])
            except OSError as error:
                self._warn(error)
                return
            except (Exception, SystemExit) as error:  # a SystemExit would silently end the thread
                self._warn(error)
                self._lost += 1
            else:
                if self._is_failing:
                    lacks = f"; it lacks {count_of(self._lost, 'report')}" if self._lost else ""
                    log.info("%s can be written again%s", self.name, lacks)
                self._is_failing = False
            self._pending.popleft()

    def _warn(self, error: BaseException) -> None:
        if not self._is_failing:
            where = getattr(error, "filename", None) or self.name
            log.warning("%s cannot be written (%s): training continues", where, describe_failure(error))
        self._is_failing = True


class RecordFile:
    """A file of records, which are appended completely or not at all."""

    def __init__(self, path: Path) -> None:
        if exists(path):
            check_regular(path)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def append(self, record: bytes) -> None:
        """Append a record; an OSError has the file's name."""
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


class LineFile(RecordFile):
    """A file with one JSON object per report. Opening it ends a line that a killed process has left incomplete."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            self.append(b"\n")

    def log(self, step: int, values: dict[str, Any], seconds: float | None = None) -> None:
        """Append a report; `seconds` since 1970, None = now."""
        moment = format_time(time.time() if seconds is None else seconds)
        self.append(json.dumps({"step": step, "time": moment, **values}).encode() + b"\n")

    def sink(self) -> Sink:
        """Return a sink that writes this file."""
        return Sink(str(self.path), self.log, self.close)


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of lines that have a step; add the number of other lines to `notes`.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    check_regular(path)
    damaged = 0
    with path.open("rb") as file:
        for line in file:
            try:
                found = parse_json(line)
            except ValueError:
                found = None
            if isinstance(found, dict) and math.isfinite(number_of(found.get("step"))):
                yield found
            else:
                damaged += 1
    if damaged:
        notes.append(f"{path}: {count_of(damaged, 'damaged line')} left out.")


def is_evaluation(report: Mapping[str, Any]) -> bool:
    """Return whether a report is that of an evaluation."""
    return "loss" not in report


def number_in_step(report: Mapping[str, Any]) -> int:
    """Return the place of a line among those of its step: 0 = report, 1 = evaluation on sets, 2 = on tasks."""
    is_of_tasks = any(name.startswith(f"evaluation_{TASK}") for name in report)
    return 2 if is_of_tasks else int(is_evaluation(report))


def number_of(value: Any) -> float:
    """Return a JSON number as a float; NaN for other values and for numbers that are too large."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def format_time(seconds: float) -> str:
    """Return seconds since 1970 as UTC, `2026-11-21T14:30:05Z`, which jq's `fromdate` reads."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def describe_failure(error: BaseException) -> str:
    """Return an error as one line for a warning."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]
