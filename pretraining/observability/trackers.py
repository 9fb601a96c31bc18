"""Where reports are kept: metrics.jsonl always, and the trackers that `--tracker` names.

At a resume, what was logged after the restored step is dropped from files: those steps are reported again. The ids by
which services know the run are kept in its folder and in its checkpoints, so that all of its starts are one run there.

Training does not end because a report cannot be kept: a full disk, or a service that is away, is one warning, and a
line when it is over. Files then get what they have missed; trackers of the user's own see to that themselves.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pretraining.config.fields import values_of
from pretraining.config.plugins import TRACKERS, load_plugin, plugin_errors
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import (
    check_regular,
    checked_values,
    exists,
    parse_json,
    read_json,
    with_checksum,
    write_atomic,
)
from pretraining.observability.report_file import JsonLineFile, ReportFile
from pretraining.text import count_of

log = logging.getLogger(__name__)

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"
IDS_FILE = "tracker_ids.json"
DEFAULT_PROJECT = "pretraining"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run when it is opened.

    Attributes:
        name: `--tracker_run_name`, or that of the run's folder.
        folder: for the tracker's files.
        restored_step: the step that the run goes on from; 0 for a new run.
        run_id: `--tracker_run_id`, or the tracker's `run_id` in earlier starts of this run; None for a new run.
        project: what the run is one of.
    """

    config: TrainConfig
    name: str
    folder: Path
    restored_step: int
    run_id: str | None = None
    project: str = DEFAULT_PROJECT


class Tracker(Protocol):
    """A place for reports: a class that rank 0 calls with a `TrackedRun`; its `run_id`, if it has one, is a text."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Keeps the values of a step; None is unknown."""

    def close(self) -> None:
        """Writes out what is buffered."""


class JsonLines(JsonLineFile):
    """metrics.jsonl: a line a report; those that will be made again after a resume are dropped when it is opened."""

    def __init__(self, run: TrackedRun, clock: Callable[[], float] = time.time) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / METRICS_FILE
        if exists(path):
            _drop_lines_after(path, run.restored_step)
        super().__init__(path, clock)


@dataclass
class Trackers:
    """All trackers of a run, by what `--tracker` says; none on other ranks than 0.

    Attributes:
        failing_since: step of the first report that a tracker did not take; without an entry all is well.
        ids_file: where ids are kept; None = nowhere.
        kept_ids: what stands there.
    """

    by_name: dict[str, Tracker] = field(default_factory=dict)
    failing_since: dict[str, int] = field(default_factory=dict)
    ids_file: Path | None = None
    kept_ids: Mapping[str, str] = field(default_factory=dict)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hands the values of a step to all; warns where one begins to fail, and says when that is over."""
        self.keep_ids()  # a service that was away may have given one meanwhile
        for name, tracker in self.by_name.items():
            try:
                tracker.log(step, values)
            except OSError as error:
                self._note_failure(name, step, error)
            else:
                self._note_success(name, step)

    def _note_failure(self, name: str, step: int, error: OSError) -> None:
        if name not in self.failing_since:
            self.failing_since[name] = step
            log.warning(
                "%s cannot be written since step %d (%s): training goes on, and each report tries again",
                *(error.filename or f"--tracker={name}", step, error.strerror or error),
            )

    def _note_success(self, name: str, step: int) -> None:
        since = self.failing_since.pop(name, None)
        if since is not None:
            log.info("step %d  %s can be written again%s", step, name, self._lost(name))

    def _lost(self, name: str) -> str:
        """Says how many reports a file lacks, if it lacks any."""
        file = getattr(self.by_name[name], "file", None)
        return f"; it lacks {count_of(file.lacks, 'report')}" if isinstance(file, ReportFile) and file.lacks else ""

    def close(self) -> None:
        """Closes all; what cannot be written any more is a warning, which must not hide how the run ended."""
        for name, tracker in self.by_name.items():
            try:
                tracker.close()
            except OSError as error:
                what = error.filename or f"--tracker={name}"
                log.warning("%s cannot be written (%s)%s", what, error.strerror or error, self._lost(name))

    def keep_ids(self) -> None:
        """Writes the ids by which trackers know the run into its folder, unless they are there."""
        ids = {**self.kept_ids, **self.state_dict()}
        if self.ids_file is None or ids == self.kept_ids:
            return
        self.kept_ids = ids
        try:
            write_atomic(self.ids_file, json.dumps(with_checksum(ids)) + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s): checkpoints keep the ids", self.ids_file, error.strerror or error)

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids by which trackers know the run, for checkpoints."""
        ids = {name: getattr(tracker, "run_id", None) for name, tracker in self.by_name.items()}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: trackers got their ids when they were opened."""


def open_trackers(config: TrainConfig, restored_step: int, run_ids: Mapping[str, Any]) -> Trackers:
    """Opens metrics.jsonl in the run's folder, if it has one, and the trackers that the settings name.

    Args:
        run_ids: `Trackers.state_dict` of the checkpoint that the run goes on from; those in its folder are newer.

    Raises:
        ConfigError: metrics or curves cannot be written, or a tracker, or the package that it needs, cannot be found.
    """
    report = config.report
    logs = None if config.checkpoint.ckpt_save_path is None else config.checkpoint.folder / LOGS
    folder = Path(report.tracker_dir) if report.tracker_dir else logs
    if folder is None:
        return Trackers()
    run = folder if logs is None else logs.parent
    tracked = TrackedRun(
        config=config,
        name=report.tracker_run_name or run.name or run.resolve().name,
        folder=folder,
        restored_step=restored_step,
        project=report.tracker_project_name or DEFAULT_PROJECT,
    )
    ids_file = None if logs is None else logs / IDS_FILE
    kept_ids = {} if ids_file is None else _read_ids(ids_file)
    run_ids = {**run_ids, **kept_ids}
    trackers: dict[str, Tracker] = {}
    try:
        if logs is not None:
            trackers[METRICS_FILE] = JsonLines(replace(tracked, folder=logs))
        for name in report.tracker:
            if name == "jsonl" and logs is not None and folder.resolve() == logs.resolve():
                continue  # metrics.jsonl is there already
            make = load_plugin("tracker", TRACKERS[name].path if name in TRACKERS else name)
            with plugin_errors("tracker", name):
                trackers[name] = make(replace(tracked, run_id=report.tracker_run_id or run_ids.get(name)))
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written to {logs or folder}, or curves to {folder}: {error}. "
            "Give a --tracker_dir (and --ckpt_save_path) that this user may write."
        ) from None
    opened = Trackers(trackers, ids_file=ids_file, kept_ids=kept_ids)
    opened.keep_ids()
    return opened


def check_trackers(config: TrainConfig) -> None:
    """Looks for what the settings name, and opens nothing.

    Raises:
        ConfigError: a tracker, or the package that it needs, cannot be found.
    """
    for name in config.report.tracker:
        load_plugin("tracker", TRACKERS[name].path if name in TRACKERS else name)
        if name in ("wandb", "mlflow") and find_spec(name) is None:
            raise missing_package(name, ImportError(f"No module named '{name}'"))


def missing_package(name: str, error: ImportError) -> ConfigError:
    """Makes the error for users whose tracker has no package."""
    return ConfigError(f"--tracker={name} needs the `{name}` package ({error}): pip install 'pretraining[{name}]'")


def _read_ids(path: Path) -> dict[str, str]:
    """Returns the ids that earlier starts have kept; what is damaged is said, and refuses nothing."""
    try:
        ids = checked_values(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is damaged (%s): trackers go on by the ids of the checkpoint, or begin anew", path, error)
        return {}
    return {name: run_id for name, run_id in ids.items() if isinstance(run_id, str)}


def plain_settings(config: TrainConfig) -> dict[str, float | str]:
    """Returns the settings of a run for trackers that compare runs: numbers as they are, the rest as flags write it."""
    return {
        name: value if type(value) in (int, float) else format_value(value) for name, value in values_of(config).items()
    }


def _drop_lines_after(path: Path, step: int) -> None:
    """Drops the reports of later steps, and says how many lines are damaged: those are dropped, too."""
    kept, damaged = [], 0
    check_regular(path)
    *lines, unfinished = path.read_bytes().split(b"\n")
    for line in lines:
        line_step = _step_of(line)
        if line_step is None:
            damaged += 1
        elif line_step <= step:
            kept.append(line)
    # The last line has no end where a process was killed that was writing it.
    line_step = _step_of(unfinished)
    if line_step is not None and line_step <= step:
        kept.append(unfinished)
    if damaged:
        log.warning("%s: %s dropped", path, count_of(damaged, "damaged line"))
    write_atomic(path, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float | None:
    """Returns the step of a report; None where the line is none."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int | float) else None
