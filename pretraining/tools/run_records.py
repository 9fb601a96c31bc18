"""Records of a run, read from its folder. The run may be running, killed or damaged.

    run_status.json, lease.json   state
    logs/metrics.jsonl            columns of numbers, of training and of evaluations
    logs/events.jsonl             events
    logs/environment.json         environment of each start
    config.yaml                   settings

A missing or damaged file leaves its part of the record empty, and adds a line to `RunRecord.notes`. This module does
not import torch.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pretraining.checkpoint.run_folder import CHECKPOINTS, STATUS_FILE, run_of
from pretraining.config.fields import settings_of, values_of
from pretraining.config.recipe_files import RUN_CONFIG_FILE, settings_in
from pretraining.config.settings_files import read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError, PretrainError
from pretraining.files import entries_of, exists, is_folder, read_json
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.report_file import is_evaluation, number_of, read_lines
from pretraining.observability.trackers import ENVIRONMENT_FILE, LOGS, METRICS_FILE
from pretraining.train.run_status import read_status

T = TypeVar("T")

LEASE_FILE, LEASE_STALE_SECONDS = "lease.json", 60.0  # as in checkpoint/lease.py, which needs torch


class Columns:
    """Numbers of reports by name. `columns[name]` is [reports] float64, with NaN for missing numbers."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._reports = 0

    def __len__(self) -> int:
        return self._reports

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        known = np.array(self._columns.get(name, ()), np.float64)
        return np.append(known, np.full(self._reports - len(known), np.nan))

    def add(self, report: Mapping[str, Any]) -> None:
        """Add the numbers of a report; its time becomes seconds since 1970."""
        for name, value in report.items():
            number = seconds_of(value) if name == "time" else number_of(value)
            if not math.isnan(number):
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self._reports - len(column)))
                column.append(number)
        self._reports += 1

    def last(self, name: str) -> float:
        """Return the last known value; NaN if there is none."""
        known = self[name][~np.isnan(self[name])]
        return float(known[-1]) if len(known) else math.nan


@dataclass
class RunRecord:
    """The contents of a run's folder.

    Attributes:
        name: folder name.
        state: finished, preempted, failed, running, killed or unknown.
        reason: why the run stopped.
        events: objects of events.jsonl.
        settings: text by `section.name`.
        environments: environment of each start, text by dotted name.
        notes: problems with reading the folder.
    """

    path: Path
    name: str
    state: str = "unknown"
    reason: str = ""
    training: Columns = field(default_factory=Columns)
    evaluations: Columns = field(default_factory=Columns)
    events: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    environments: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_PARTS = (RUN_CONFIG_FILE, STATUS_FILE, CHECKPOINTS, f"{LOGS}/{METRICS_FILE}")
SWEEP_FILE = "sweep.csv"


def _is_run(folder: Path) -> bool:
    return any(exists(folder / part) for part in _PARTS)


def runs_of_sweep(folder: Path) -> list[Path]:
    """Return the runs in the folder of a sweep by name; none if it is none."""
    if not exists(folder / SWEEP_FILE):
        return []
    return sorted(entry for entry in entries_of(folder) if is_folder(entry) and _is_run(entry))


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Read the folders of runs, and those in the folder of a sweep; raise a ConfigError if a folder is not a run."""
    given = [Path(path) for path in paths]
    folders = [run for folder in given for run in (runs_of_sweep(folder) or [run_of(folder)])]
    problems = [
        f"--run_path={folder} is not a run: it has none of {', '.join(_PARTS)}"
        for folder in folders
        if not _is_run(folder)
    ]
    if problems:
        raise ConfigError(problems)
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder; a file that cannot be read becomes a note."""
    run = RunRecord(folder, name)

    def try_read(name: str, read: Callable[[Path], T], default: T) -> T:
        try:
            return read(folder / name)
        except FileNotFoundError:
            run.notes.append(f"There is no {name}.")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, PretrainError) as error:
            run.notes.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return default

    status = try_read(STATUS_FILE, read_status, None)
    if status is None:
        run.notes.append(f"The run's state is unknown: {STATUS_FILE} is missing or damaged.")
    else:
        run.state, run.reason = status.status or "unknown", status.reason
        if run.state == "running":
            run.state, run.reason = "running" if _is_held(folder) else "killed", ""
    try_read(f"{LOGS}/{METRICS_FILE}", lambda path: _read_metrics(path, run), None)
    run.events = try_read(f"{LOGS}/{EVENTS_FILE}", lambda path: list(read_lines(path, run.notes)), [])
    config = try_read(RUN_CONFIG_FILE, lambda path: settings_in(read_text(path, path.name), path.name), None)
    run.settings = {} if config is None else settings_as_text(config)
    run.environments = try_read(
        f"{LOGS}/{ENVIRONMENT_FILE}", lambda path: [flatten(record) for record in read_json(path)], []
    )
    return run


def seconds_of(text: Any) -> float:
    """Return seconds since 1970 of an ISO time; NaN for other values."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _read_metrics(path: Path, run: RunRecord) -> None:
    for report in read_lines(path, run.notes):
        (run.evaluations if is_evaluation(report) else run.training).add(report)


def _is_held(folder: Path) -> bool:
    """Return whether the lease of the run was renewed recently."""
    try:
        return time.time() - (folder / LEASE_FILE).stat().st_mtime < LEASE_STALE_SECONDS
    except OSError:
        return False


def settings_as_text(config: TrainConfig) -> dict[str, str]:
    """Return all settings as text by `section.name`."""
    settings = settings_of(TrainConfig)
    return {f"{settings[name].section}.{name}": format_value(value) for name, value in values_of(config).items()}


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a JSON object as text by dotted name; a list becomes one text."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            texts |= flatten(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return texts
