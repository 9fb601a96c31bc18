"""The destinations of reports: metrics.jsonl, and the trackers that `--tracker` names.

    a report --> metrics.jsonl, at once
             --> the queue of each tracker --> its thread, which makes, calls and closes the tracker

Only its own thread waits for a tracker, so a slow or missing service does not slow down the run.

A resume drops later steps from metrics.jsonl, because they will be reported again. Checkpoints store the run ids of
services, so that all starts share one run there.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from pretraining.config.fields import values_of
from pretraining.config.plugins import TRACKERS, load_plugin, plugin_errors
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import exists, write_atomic
from pretraining.observability.report_file import (
    MAX_PENDING,
    LineFile,
    Sink,
    describe_failure,
    number_in_step,
    read_lines,
)
from pretraining.progress import PENDING_EVALUATION, PENDING_TASKS

log = logging.getLogger(__name__)

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"
ENVIRONMENT_FILE = "environment.json"
DEFAULT_PROJECT = "pretraining"
START_SECONDS = 30.0
"""Maximum wait for a tracker's start, which reveals errors and the run id."""
FINISH_SECONDS = 60.0
"""Maximum wait at the end of the run for a tracker's last reports."""


@dataclass(frozen=True)
class TrackedRun:
    """The run, as a tracker's constructor gets it.

    Attributes:
        name: `--tracker_run_name`, or the name of the run's folder.
        folder: folder for the tracker's files.
        restored_step: step from which the run resumes; 0 for a new run.
        run_id: `--tracker_run_id`, or the tracker's `run_id` at the last start; None for a new run.
        given: `name` and `project` if a flag gives them, else the tracker's `places` at the last start. A service's own
            environment and settings come before the defaults of this class.
        identity: id of the run in run_status.json; empty if it saves nothing.
    """

    config: TrainConfig
    name: str
    folder: Path
    restored_step: int
    run_id: str | None = None
    project: str = DEFAULT_PROJECT
    given: Mapping[str, str] = field(default_factory=dict)
    identity: str = ""

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier start recorded the run id."""
        return self.run_id is not None and self.run_id != self.config.report.tracker_run_id


class Tracker(Protocol):
    """A tracker of reports. Rank 0 calls the class with a `TrackedRun`, and runs all its methods in one thread.

    The attribute `run_id`, a string, is optional; so is `places`, texts by name that the next start gets in `given`.
    """

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log the values of a step; None = unknown."""

    def close(self) -> None:
        """Write buffered values."""


class QueuedSink(Sink):
    """A sink with a thread that makes, calls and closes a tracker."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._tracker: Future[Tracker] = Future()
        super().__init__(
            name, lambda *report: self._tracker.result().log(*report[:2]), lambda: self._tracker.result().close()
        )
        self.places: dict[str, str] = {}
        self._queue: SimpleQueue[Any] = SimpleQueue()  # reports, then the run's exception or None
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def run_id(self) -> str | None:
        """The tracker's id of the run, as text; None if it has none, or has not started."""
        if not self._tracker.done() or self._tracker.exception() is not None:
            return None
        try:
            run_id = getattr(self._tracker.result(), "run_id", None)
            self.places = dict(getattr(self._tracker.result(), "places", {}))
            return None if run_id is None else str(run_id)
        except Exception as error:  # of a property of a user-defined tracker
            self._warn(error)
            return None

    def await_start(self) -> None:
        """Wait up to `START_SECONDS` for the tracker's start; raise its errors, except for connection errors."""
        if not wait([self._tracker], START_SECONDS).done:
            log.warning("%s has not started after %g s: training starts, reports wait", self.name, START_SECONDS)
        elif not isinstance(self._tracker.exception(), ConnectionError | TimeoutError):
            self._tracker.result()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Queue a report; drop it if the queue is full."""
        if not self._thread.is_alive():  # the tracker failed to start
            return
        if self._queue.qsize() < MAX_PENDING:
            self._queue.put((step, values, time.time()))
        else:
            self._lost += 1

    def close(self) -> None:
        """Wait up to `FINISH_SECONDS` until the tracker has all reports and is closed."""
        self._queue.put(sys.exception())
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            log.warning("%s has not finished after %g s: it lacks reports", self.name, FINISH_SECONDS)

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            self._tracker.set_result(make())
        except BaseException as error:
            reason = describe_failure(error)
            log.warning("%s cannot be started (%s)", self.name, reason)
            self._tracker.set_exception(error)
            return
        while isinstance(report := self._queue.get(), tuple):
            self.put(report)
        if report is None:
            super().close()
            return
        traceback = report.__traceback__
        try:
            raise report  # makes `sys.exception()` available to the tracker
        except BaseException as error:
            super().close()
            error.__traceback__ = traceback


@dataclass
class Trackers:
    """All sinks of a run by name; empty on ranks other than 0.

    Attributes:
        ids: run ids of trackers before this start.
    """

    sinks: dict[str, Sink] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log the values of a step to all sinks."""
        for sink in self.sinks.values():
            sink.log(step, values)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks.values():
            sink.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the trackers' run ids by name, and their places as `name.place`."""
        state = dict(self.ids)
        for name, sink in self.sinks.items():
            if isinstance(sink, QueuedSink) and (run_id := sink.run_id) is not None:
                state |= {name: run_id, **{f"{name}.{place}": text for place, text in sink.places.items()}}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: trackers got their ids at the start."""


def open_trackers(
    config: TrainConfig,
    restored_step: int,
    run_ids: Mapping[str, Any],
    pending: Collection[str] = (),
    identity: str = "",
) -> Trackers:
    """Open metrics.jsonl in the run's folder, if there is one, and start the trackers of the settings.

    Args:
        run_ids: `Trackers.state_dict` of the restored checkpoint.
        pending: keys of the evaluations that the run repeats (`Manifest.pending`).
        identity: as in `TrackedRun`.

    Raises:
        ConfigError: a file is not writable, or a tracker or its package is missing.
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
        identity=identity,
    )
    trackers = Trackers(ids={name: run_id for name, run_id in run_ids.items() if isinstance(run_id, str)})
    try:
        if logs is not None:
            trackers.sinks[METRICS_FILE] = open_metrics(logs / METRICS_FILE, restored_step, pending)
        for name in report.tracker:
            trackers.sinks[name] = _start_tracker(name, _continued(tracked, name, trackers.ids))
    except BaseException as error:
        trackers.close()
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"metrics cannot be written to {logs or folder}, or curves to {folder}: {error}. "
            "Give a writable --tracker_dir (and --ckpt_save_path)."
        ) from None
    return trackers


def _continued(run: TrackedRun, tracker: str, ids: Mapping[str, str]) -> TrackedRun:
    """Return the run with what flags and the earlier start of a tracker say about it."""
    report = run.config.report
    flags = {"name": report.tracker_run_name, "project": report.tracker_project_name}
    places = {name.removeprefix(f"{tracker}."): text for name, text in ids.items() if name.startswith(f"{tracker}.")}
    given = {**places, **{name: text for name, text in flags.items() if text is not None}}
    project = given.get("project", DEFAULT_PROJECT)
    return replace(run, run_id=report.tracker_run_id or ids.get(tracker), project=project, given=given)


def _start_tracker(name: str, run: TrackedRun) -> QueuedSink:
    tracker_class = _find_tracker(name)

    def make() -> Tracker:
        with plugin_errors("tracker", name):
            tracker: Tracker = tracker_class(run)
            return tracker

    sink = QueuedSink(f"--tracker={name}", make)
    sink.await_start()
    return sink


def _find_tracker(name: str) -> Any:
    # A folder of this name, which wandb makes, is a package without an origin.
    if name in ("wandb", "mlflow") and getattr(find_spec(name), "origin", None) is None:
        raise ConfigError(f"--tracker={name} needs the `{name}` package: pip install 'pretraining[{name}]'")
    return load_plugin("tracker", TRACKERS[name].path if name in TRACKERS else name)


def check_trackers(config: TrainConfig) -> None:
    """Check that the trackers of the settings exist, without starting them.

    Raises:
        ConfigError: a tracker or its package is missing.
    """
    for name in config.report.tracker:
        _find_tracker(name)


def plain_settings(config: TrainConfig) -> dict[str, float | str]:
    """Return the settings of a run for trackers: numbers, and other values as the text of a flag."""
    return {
        name: value if type(value) in (int, float) else format_value(value) for name, value in values_of(config).items()
    }


def open_metrics(path: Path, restored_step: int, pending: Collection[str] = ()) -> Sink:
    """Open metrics.jsonl, without damaged lines and the lines that the run will report again.

    Args:
        pending: keys of the evaluations of the restored step that the run repeats.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if exists(path):
        notes: list[str] = []
        repeated = {(PENDING_EVALUATION, PENDING_TASKS).index(key) + 1 for key in pending}
        kept = [
            report
            for report in read_lines(path, notes)
            if report["step"] <= restored_step - (number_in_step(report) in repeated)
        ]
        write_atomic(path, "".join(json.dumps(report) + "\n" for report in kept))
        for note in notes:
            log.warning("%s", note)
    return LineFile(path).sink()
