"""Where reports go: to metrics.jsonl always, and to the trackers that `--tracker` names.

    a report --> metrics.jsonl, at once
             --> the queue of each tracker --> its thread, which starts it, logs and closes it

Only a tracker's own thread waits for it, so a service that is slow or away costs the run nothing. A failure is one
warning, and one line when it is over.

A resume drops what metrics.jsonl holds of later steps: they are reported again. Checkpoints keep the ids by which
services know the run, so that all of its starts are one run there.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pretraining.config.fields import values_of
from pretraining.config.plugins import TRACKERS, load_plugin, plugin_errors
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import check_regular, exists, parse_json, write_atomic
from pretraining.observability.report_file import MOST_WAITING, JsonLineFile
from pretraining.text import count_of

log = logging.getLogger(__name__)

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"
DEFAULT_PROJECT = "pretraining"
START_SECONDS = 30.0
"""How long the run waits for a tracker to start, so that a mistake is refused and the first checkpoint has its id."""
FINISH_SECONDS = 60.0
"""How long the end of the run waits until a tracker has all reports."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run when it is started.

    Attributes:
        name: `--tracker_run_name`, or that of the run's folder.
        folder: for the tracker's files.
        restored_step: the step that the run resumes from; 0 for a new run.
        run_id: `--tracker_run_id`, or the tracker's `run_id` in earlier starts of this run; None for a new run.
        project: the project that the run belongs to.
    """

    config: TrainConfig
    name: str
    folder: Path
    restored_step: int
    run_id: str | None = None
    project: str = DEFAULT_PROJECT


class Tracker(Protocol):
    """A place for reports: a class that rank 0 calls with a `TrackedRun`; its `run_id`, if it has one, is a text.

    Everything of a tracker runs in one thread of its own.
    """

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Keep the values of a step; None is unknown."""

    def close(self) -> None:
        """Write out what is buffered."""


class JsonLines(JsonLineFile):
    """metrics.jsonl: a line per report. Opening it drops the lines that a resumed run will report again."""

    def __init__(self, run: TrackedRun, clock: Callable[[], float] = time.time) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        path = run.folder / METRICS_FILE
        if exists(path):
            _drop_lines_after(path, run.restored_step)
        super().__init__(path, clock)


class ReportSink:
    """Hands reports to a tracker, and turns its failures into warnings.

    Args:
        name: the tracker's, for warnings about errors that name no file.
    """

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self.name = name
        self.tracker = tracker  # None until a queue's thread has started it
        self._is_failing = False

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Log a report; warn if the tracker begins to fail, and say when that is over."""
        assert self.tracker is not None
        try:
            self.tracker.log(step, values)
        except (Exception, SystemExit) as error:  # Python ends a thread at a SystemExit without a word
            if not self._is_failing:
                where, why = getattr(error, "filename", None) or self.name, describe_failure(error)
                log.warning("%s cannot be written since step %d (%s): training goes on", where, step, why)
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("step %d  %s can be written again%s", step, self.name, self._missing())
            self._is_failing = False

    def close(self) -> None:
        """Close the tracker; a failure must not hide how the run ended."""
        assert self.tracker is not None
        try:
            self.tracker.close()
        except (Exception, SystemExit) as error:
            where, why = getattr(error, "filename", None) or self.name, describe_failure(error)
            log.warning("%s cannot be written (%s)%s", where, why, self._missing())

    def _missing(self) -> str:
        lacks = getattr(self.tracker, "lacks", 0)
        return f"; it lacks {count_of(lacks, 'report')}" if lacks else ""


class QueuedSink(ReportSink):
    """A sink with a thread that makes, calls and closes the tracker; whoever reports never waits for it.

    Args:
        make: makes the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name, None)
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._is_full = self._is_closing = False
        self._ending: BaseException | None = None
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def await_start(self) -> None:
        """Wait until the tracker has started, for a while; raise what refuses it."""
        if not wait([self._started], START_SECONDS).done:
            log.warning("%s has not started after %g s: training begins, reports wait", self.name, START_SECONDS)
            self._started.add_done_callback(self._warn_of_failed_start)
        elif isinstance(self._started.exception(), ConnectionError | TimeoutError):
            self._warn_of_failed_start(self._started)
        else:
            self._started.result()

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Queue a report; the oldest one goes if there are too many."""
        if not self._thread.is_alive():  # the tracker has not started
            return
        with self._changed:
            if len(self._waiting) == MOST_WAITING and not self._is_full:
                self._is_full = True
                log.warning("%s does not keep up: the oldest of %d reports are dropped", self.name, MOST_WAITING)
            self._waiting.append((step, values))
            self._changed.notify()

    def close(self) -> None:
        """Wait until the tracker has all reports and is closed, for a while."""
        with self._changed:
            self._ending, self._is_closing = sys.exception(), True
            self._changed.notify()
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            log.warning("%s does not answer; it lacks %s", self.name, count_of(len(self._waiting), "report"))

    def _work(self, make: Callable[[], Tracker]) -> None:
        try:
            self.tracker = make()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while (report := self._next()) is not None:
            super().log(*report)
        if self._ending is None:
            super().close()
            return
        traceback = self._ending.__traceback__
        try:
            raise self._ending  # `sys.exception()` tells the tracker how the run ends
        except BaseException as error:
            super().close()
            error.__traceback__ = traceback

    def _next(self) -> tuple[int, dict[str, Any]] | None:
        """Return the oldest report once there is one; None if the run has ended and there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _warn_of_failed_start(self, started: Future[None]) -> None:
        if (error := started.exception()) is not None:
            log.warning("%s cannot be started (%s): training goes on without it", self.name, describe_failure(error))


@dataclass
class Trackers:
    """All sinks of a run, by what `--tracker` says; none on other ranks than 0.

    Attributes:
        ids: by which trackers knew the run before this start.
    """

    sinks: dict[str, ReportSink] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hand the values of a step to all."""
        for sink in self.sinks.values():
            sink.log(step, values)

    def close(self) -> None:
        """Close all."""
        for sink in self.sinks.values():
            sink.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the ids by which trackers know the run, for checkpoints."""
        ids = {name: getattr(sink.tracker, "run_id", None) for name, sink in self.sinks.items()}
        return {**self.ids, **{name: run_id for name, run_id in ids.items() if run_id is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: trackers got their ids when they were started."""


def open_trackers(config: TrainConfig, restored_step: int, run_ids: Mapping[str, Any]) -> Trackers:
    """Open metrics.jsonl in the run's folder, if it has one, and start the trackers that the settings name.

    Args:
        run_ids: `Trackers.state_dict` of the checkpoint that the run resumes from.

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
    trackers = Trackers(ids={name: run_id for name, run_id in run_ids.items() if isinstance(run_id, str)})
    try:
        if logs is not None:
            trackers.sinks[METRICS_FILE] = ReportSink(METRICS_FILE, JsonLines(replace(tracked, folder=logs)))
        for name in report.tracker:
            if name == "jsonl" and logs is not None and folder.resolve() == logs.resolve():
                continue  # metrics.jsonl is there already
            run_id = report.tracker_run_id or trackers.ids.get(name)
            trackers.sinks[name] = _start_tracker(name, replace(tracked, run_id=run_id))
    except BaseException as error:
        trackers.close()
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"metrics cannot be written to {logs or folder}, or curves to {folder}: {error}. "
            "Give a --tracker_dir (and --ckpt_save_path) that this user may write."
        ) from None
    return trackers


def _start_tracker(name: str, run: TrackedRun) -> QueuedSink:
    tracker_class = load_plugin("tracker", TRACKERS[name].path if name in TRACKERS else name)

    def make() -> Tracker:
        with plugin_errors("tracker", name):
            tracker: Tracker = tracker_class(run)
            return tracker

    sink = QueuedSink(f"--tracker={name}", make)
    sink.await_start()
    return sink


def check_trackers(config: TrainConfig) -> None:
    """Look for the trackers that the settings name, and start none.

    Raises:
        ConfigError: a tracker, or the package that it needs, cannot be found.
    """
    for name in config.report.tracker:
        load_plugin("tracker", TRACKERS[name].path if name in TRACKERS else name)
        if name in ("wandb", "mlflow") and find_spec(name) is None:
            raise missing_package(name, ImportError(f"No module named '{name}'"))


def missing_package(name: str, error: ImportError) -> ConfigError:
    """Return the error for users whose tracker has no package."""
    return ConfigError(f"--tracker={name} needs the `{name}` package ({error}): pip install 'pretraining[{name}]'")


def describe_failure(error: BaseException) -> str:
    """Return what a warning says about an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def plain_settings(config: TrainConfig) -> dict[str, float | str]:
    """Return the settings of a run for trackers that compare runs: numbers as they are, the rest as flags write it."""
    return {
        name: value if type(value) in (int, float) else format_value(value) for name, value in values_of(config).items()
    }


def _drop_lines_after(path: Path, step: int) -> None:
    """Drop the reports of later steps, and damaged lines, whose number is said."""
    check_regular(path)
    lines = path.read_bytes().split(b"\n")
    steps = [_step_of(line) for line in lines]
    damaged = steps[:-1].count(None)  # a kill may leave the last line without an end
    if damaged:
        log.warning("%s: %s dropped", path, count_of(damaged, "damaged line"))
    kept = (line for line, its_step in zip(lines, steps, strict=True) if its_step is not None and its_step <= step)
    write_atomic(path, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float | None:
    """Return the step of a report; None if the line is none."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int | float) else None
