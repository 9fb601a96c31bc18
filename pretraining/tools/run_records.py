"""What a run's folder holds, as plain data. The run may be under way, killed at any moment, or damaged.

    run_status.json, lease.json   its state
    logs/metrics.jsonl            columns of numbers, of training and of evaluations
    logs/events.jsonl             what happened
    logs/environment.json         what each start ran on
    config.yaml                   settings
    checkpoints/                  the newest one knows the mixture

A missing or damaged file costs what it holds, and adds a line to `RunRecord.notes`. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pretraining.checkpoint.manifest import Manifest, read_document
from pretraining.checkpoint.run_folder import CHECKPOINTS, committed_checkpoints, run_of
from pretraining.checkpoint.run_path import CONFIG_FILE
from pretraining.config.recipes import parse_recipe
from pretraining.config.settings_files import read_text
from pretraining.data.resume import restored_mixture
from pretraining.errors import CheckpointError, ConfigError, PretrainError
from pretraining.files import check_regular, exists, is_folder, parse_json, read_json
from pretraining.observability.events import EVENTS_FILE
from pretraining.observability.trackers import LOGS, METRICS_FILE
from pretraining.text import count_of
from pretraining.train.run_status import STATUS_FILE, read_status

T = TypeVar("T")

LEASE_FILE, LEASE_STALE_SECONDS = "lease.json", 60.0  # as in checkpoint/lease.py, which needs torch
ENVIRONMENT_FILE = "environment.json"  # as in observability/environment.py, which needs torch


class Columns:
    """Numbers of reports by name. `columns[name]` is [reports] float64, NaN where a report has none."""

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
        """Add a report. A time becomes seconds since 1970; what is no number is left out."""
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


@dataclass(frozen=True)
class MixturePart:
    """What a dataset gave in a phase of the run.

    Attributes:
        first_step, end_step: of the phase, the end not included.
        asked: its share by the weights.
        realised: its share of the samples that were trained on.
    """

    first_step: int
    end_step: int
    dataset: str
    asked: float
    samples: int
    realised: float


@dataclass
class RunRecord:
    """Everything that is known of a run.

    Attributes:
        name: of the folder.
        state: finished, preempted, failed, running, killed or unknown.
        reason: why it ended.
        events: objects of events.jsonl.
        settings: as text, by `section.name`.
        environments: what each start ran on, as text by dotted names.
        notes: what could not be read.
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
    mixture: list[MixturePart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Read the folders of runs.

    Raises:
        ConfigError: a folder is no run.
    """
    folders = [run_of(Path(path)) for path in paths]
    parts = (CONFIG_FILE, STATUS_FILE, CHECKPOINTS, f"{LOGS}/{METRICS_FILE}")
    problems = [
        f"--run_path={folder} is no run: it has none of {', '.join(parts)}"
        for folder in folders
        if not any(exists(folder / part) for part in parts)
    ]
    if problems:
        raise ConfigError(problems)
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    # A name need not be UTF-8, and what draws it takes nothing else.
    names = [os.fsencode(name).decode("utf-8", "replace") for name in names]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder. What cannot be read is a note."""
    run = RunRecord(folder, name)

    def or_note(what: str, read: Callable[[Path], T], missing: T) -> T:
        try:
            return read(folder / what)
        except FileNotFoundError:
            run.notes.append(f"There is no {what}.")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, PretrainError) as error:
            run.notes.append(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}.")
        return missing

    status = or_note(STATUS_FILE, read_status, None)
    if status is None:
        run.notes.append(f"The run's state is unknown: {STATUS_FILE} is missing or damaged.")
    else:
        run.state, run.reason = status.status or "unknown", status.reason
        if run.state == "running":
            run.state, run.reason = "running" if _is_held(folder) else "killed", ""
    or_note(f"{LOGS}/{METRICS_FILE}", lambda path: _read_metrics(path, run), None)
    run.events = or_note(f"{LOGS}/{EVENTS_FILE}", lambda path: list(read_lines(path, run.notes)), [])
    run.settings = or_note(CONFIG_FILE, _read_settings, {})
    run.environments = or_note(f"{LOGS}/{ENVIRONMENT_FILE}", _read_environments, [])
    if is_folder(folder / CHECKPOINTS):
        run.mixture = or_note(CHECKPOINTS, lambda _: _newest_mixture(folder), [])
    return run


def read_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines that have a step; the number of other lines is added to `notes`.

    Raises:
        OSError: the file cannot be read, or is no regular file.
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
        notes.append(f"{path.name}: {count_of(damaged, 'damaged line')} left out.")


def number_of(value: Any) -> float:
    """Return a JSON number as a float; NaN if it is none, or is too large."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def seconds_of(written: Any) -> float:
    """Return seconds since 1970 of a time as files of a run have it; NaN if it is none."""
    try:
        return datetime.fromisoformat(written).timestamp()
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _read_metrics(path: Path, run: RunRecord) -> None:
    for report in read_lines(path, run.notes):
        is_evaluation = "loss" not in report and any(name.startswith("evaluation_") for name in report)
        (run.evaluations if is_evaluation else run.training).add(report)


def _is_held(folder: Path) -> bool:
    """Return whether a process renewed the run's lease a moment ago."""
    try:
        return time.time() - (folder / LEASE_FILE).stat().st_mtime < LEASE_STALE_SECONDS
    except OSError:
        return False


def _read_settings(path: Path) -> dict[str, str]:
    if not exists(path):
        raise FileNotFoundError
    texts = {}
    for given in parse_recipe(read_text(path, CONFIG_FILE), CONFIG_FILE):
        raw = "none" if given.raw is None else given.raw
        texts[".".join(filter(None, given.section_and_name))] = raw if isinstance(raw, str) else ",".join(raw)
    return texts


def _read_environments(path: Path) -> list[dict[str, str]]:
    return [flatten(record) for record in read_json(path)]


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a JSON object as text, by dotted names; a list is one text."""
    texts: dict[str, str] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            texts |= flatten(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _newest_mixture(folder: Path) -> list[MixturePart]:
    for each in reversed(committed_checkpoints(folder)):
        try:
            return mixture_of(read_document(each.path))
        except CheckpointError:  # `pretrain verify` says what is wrong with it
            continue
    return []


def mixture_of(manifest: Manifest) -> list[MixturePart]:
    """Return what each dataset was to give and has given up to a checkpoint; nothing if there is one dataset.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: the state of the data is damaged.
    """
    if not manifest.data:
        return []
    mixture = restored_mixture(manifest.data)
    if len(mixture.names) < 2:
        return []
    ends = [*(phase.first_step for phase in mixture.phases[1:]), manifest.step]
    parts = []
    for phase, end in zip(mixture.phases, ends, strict=True):
        samples = dict.fromkeys(phase.weights, 0)
        for _, ranges in mixture.taken(phase.first_step, end):
            for name in samples:
                samples[name] += ranges[name][1] - ranges[name][0]
        total, weights = sum(samples.values()), sum(phase.weights.values())
        parts += [
            MixturePart(phase.first_step, end, name, phase.weights[name] / weights, count, count / total)
            for name, count in samples.items()
            if total
        ]
    return parts
