"""metrics.jsonl, read in one pass: curves that are thinned on the way, and what a run comes to.

lines --read_objects--> objects --Reports--> columns of a few thousand --Thinner--> Curve a number
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretraining.files import check_regular, parse_json
from pretraining.tools.report.curves import Curve, Thinner

LONGEST_LINE_BYTES = 2**20
AT_ONCE = 2**12
"""Reports that are held before their numbers are thinned."""
MOST_CURVES = 500
"""Different numbers of a run; more are a file that is none of ours."""
LATEST = 1e11
"""Seconds since 1970, in the year 5138: what is later can hardly be written as a date."""
EVALUATION = "evaluation_"
POSITIONS = ("step", "tokens_seen", "time")


@dataclass
class Lines:
    """What reading a file of JSON lines met besides objects.

    Attributes:
        damaged: lines that are no object.
        is_cut: whether the last line has no end and is no object, as while it is being written, or after a kill.
    """

    damaged: int = 0
    is_cut: bool = False


def read_objects(path: Path, lines: Lines) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file of JSON lines that may come from anywhere, and notes what else is there.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    check_regular(path)
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            found = _parse(line)
            while not line.endswith(b"\n") and (line := file.readline(LONGEST_LINE_BYTES)):
                found = None  # longer than any line that is written here
            if found is not None:
                yield found
            elif line or is_whole:
                lines.damaged += bool(line.strip())
            else:
                lines.is_cut = True


def read_reports(path: Path, lines: Lines) -> Iterator[dict[str, Any]]:
    """Yields the lines of metrics.jsonl that have a step; the others count as damaged.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    for report in read_objects(path, lines):
        if math.isfinite(number_of(report.get("step"))):
            yield report
        else:
            lines.damaged += 1


def _parse(line: bytes) -> dict[str, Any] | None:
    # What is flat and plain needs none of the checks of `parse_json`, which take as long as reading it.
    is_plain = line.count(b"{") == 1 and b"[" not in line and b"\\u" not in line
    try:
        document = json.loads(line) if is_plain else parse_json(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def seconds_of(written: Any) -> float:
    """Returns seconds since 1970 of a time as it stands in files of a run; NaN where it is none."""
    try:
        seconds = datetime.fromisoformat(written).timestamp()
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return seconds if 0 <= seconds < LATEST else math.nan


def number_of(value: Any) -> float:
    """Returns a JSON number as a float; NaN where it is none, or too large for one."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


@dataclass
class Means:
    """Means over the time trained, of numbers that reports give for an interval.

    Attributes:
        seconds: time trained, without evaluations and saves: the sum of steps times seconds a step.
    """

    seconds: float = 0.0
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, values: dict[str, NDArray[np.float64]], steps: NDArray[np.float64]) -> None:
        """Adds the intervals of some reports; `steps` are those of each, all arrays [reports]."""
        weights = np.nan_to_num(values["step_seconds"] * np.maximum(steps, 0.0), posinf=0.0, neginf=0.0)
        self.seconds += float(weights.sum())
        for name, column in values.items():
            known = np.isfinite(column)
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (
                total + float((column[known] * weights[known]).sum()),
                weight + float(weights[known].sum()),
            )

    def of(self, name: str) -> float | None:
        """Returns the mean of a number; None where it is not known."""
        total, weight = self._sums.get(name, (0.0, 0.0))
        return total / weight if weight > 0 else None


class Reports:
    """Reports of one kind, those of training or those of evaluations; `finish` comes after the last one.

    Attributes:
        means: over time, of rates.
        backwards: reports whose step is not above that of the one before.
        newest: the last report.
        left_out: numbers that are not drawn, because there are too many different ones.
    """

    MEANS = ("step_seconds", "tokens_per_second_per_gpu", "mfu", "data_share")

    def __init__(self) -> None:
        self.means = Means()
        self.backwards = 0
        self.newest: dict[str, Any] = {}
        self.left_out: set[str] = set()
        self._positions = {name: array("d") for name in POSITIONS}
        self._thinners: dict[str, Thinner] = {}
        self._waiting: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._positions["step"])

    def add(self, report: dict[str, Any]) -> None:
        """Adds a report, which has a step."""
        self._waiting.append(report)
        if len(self._waiting) == AT_ONCE:
            self.finish()

    def position(self, name: str) -> NDArray[np.float64]:
        """Returns step, tokens_seen or time (seconds since 1970) of all reports, [reports]; NaN is unknown."""
        return np.array(self._positions[name], np.float64)

    def curves(self) -> dict[str, Curve]:
        """Returns the curves by the names of their numbers, in the order in which the file has them."""
        found = {name: thinner.curve(len(self)) for name, thinner in self._thinners.items()}
        return {name: curve for name, curve in found.items() if curve is not None}

    def finish(self) -> None:
        """Thins what waits."""
        reports, self._waiting = self._waiting, []
        if not reports:
            return
        first = len(self)
        step_before = self._positions["step"][-1] if first else 0.0
        for name, position in self._positions.items():
            position.extend(
                map(seconds_of, (report.get(name) for report in reports)) if name == "time" else column(reports, name)
            )
        intervals = np.diff(np.array(self._positions["step"][first:]), prepend=step_before)
        self.backwards += int((intervals <= 0).sum())
        self.means.add({name: column(reports, name) for name in self.MEANS}, intervals)
        rows = np.arange(first, first + len(reports))
        for name in dict.fromkeys(name for report in reports for name in report if name not in POSITIONS):
            if name in self._thinners or len(self._thinners) < MOST_CURVES:
                self._thinners.setdefault(name, Thinner()).add(rows, column(reports, name))
            else:
                self.left_out.add(name[:80])
        self.newest = reports[-1]


def column(reports: Sequence[Mapping[str, Any]], name: str) -> NDArray[np.float64]:
    """Returns a number of some reports, [reports]; NaN where one has none."""
    values = [report.get(name) for report in reports]
    if set(map(type, values)) <= {float, type(None)}:
        return np.array(values, np.float64)  # None becomes NaN
    return np.array([number_of(value) for value in values], np.float64)


def read_metrics(path: Path, lines: Lines) -> tuple[Reports, Reports]:
    """Reads metrics.jsonl into the reports of training and those of evaluations; raises as `read_reports`."""
    training, evaluations = Reports(), Reports()
    for report in read_reports(path, lines):
        is_evaluation = "loss" not in report and any(name.startswith(EVALUATION) for name in report)
        (evaluations if is_evaluation else training).add(report)
    training.finish()
    evaluations.finish()
    return training, evaluations
