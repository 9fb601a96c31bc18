"""Where reports are kept: metrics.jsonl always, and the trackers that `--tracker` names.

At a resume, what was logged after the restored step is dropped: those steps are reported again. Checkpoints keep the id
by which a tracker, such as an online service, knows the run.

Training does not end because a report cannot be kept: a full disk, or a service that is away, is one warning, and a
line when it is over. Files then get what they have missed; trackers of the user's own see to that themselves.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from pretraining.config.plugins import TRACKERS, load_plugin
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import check_regular, exists, parse_json, write_atomic
from pretraining.observability.report_file import JsonLineFile, ReportFile

log = logging.getLogger(__name__)

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run when it is opened.

    Attributes:
        name: of the run's folder.
        folder: for the tracker's files.
        restored_step: the step that the run goes on from; 0 for a new run.
        run_id: the tracker's `run_id` in the checkpoint; None for a new run.
    """

    config: TrainConfig
    name: str
    folder: Path
    restored_step: int
    run_id: str | None = None


class Tracker(Protocol):
    """A place for reports: a class that rank 0 calls with a `TrackedRun`; its `run_id`, if it has one, is a text."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Keeps the values of a step; None is unknown."""

    def close(self) -> None:
        """Writes out what is buffered."""


class JsonLines(JsonLineFile):
    """metrics.jsonl: a line a report; those that will be made again after a resume are dropped when it is opened."""

    def __init__(self, folder: Path, restored_step: int, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if exists(path):
            _drop_lines_after(path, restored_step)
        super().__init__(path, clock)


class TensorBoard:
    """Scalars for TensorBoard, in an event file of this process.

    TensorBoard's own writer has a thread that a full disk ends, and with it all curves.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only rank 0 needs it, and it takes its time
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        run.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        paths = (run.folder / f"{name}.{number}" for number in count())
        self.file = ReportFile(next(path for path in paths if not exists(path)))
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run.restored_step:  # TensorBoard hides what an earlier process logged from the next step on
            start = SessionLog(status=SessionLog.START)
            self._append(Event(wall_time=time.time(), step=run.restored_step + 1, session_log=start))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Adds a point to each curve."""
        points = [
            self._summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None
        ]
        self._append(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.append(record.getvalue())

    def close(self) -> None:
        """Closes the event file."""
        self.file.close()


@dataclass
class Trackers:
    """All trackers of a run, by what `--tracker` says; none on other ranks than 0.

    Attributes:
        failing_since: step of the first report that a tracker did not take; without an entry all is well.
    """

    by_name: dict[str, Tracker] = field(default_factory=dict)
    failing_since: dict[str, int] = field(default_factory=dict)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hands the values of a step to all; warns where one begins to fail, and says when that is over."""
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
        return f"; it lacks {file.lacks} reports" if isinstance(file, ReportFile) and file.lacks else ""

    def close(self) -> None:
        """Closes all; what cannot be written any more is a warning, which must not hide how the run ended."""
        for name, tracker in self.by_name.items():
            try:
                tracker.close()
            except OSError as error:
                what = error.filename or f"--tracker={name}"
                log.warning("%s cannot be written (%s)%s", what, error.strerror or error, self._lost(name))

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids by which trackers know the run, for checkpoints."""
        ids = {name: getattr(tracker, "run_id", None) for name, tracker in self.by_name.items()}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Does nothing: trackers got their ids when they were opened."""


def open_trackers(config: TrainConfig, restored_step: int, run_ids: Mapping[str, Any]) -> Trackers:
    """Opens metrics.jsonl and the trackers that the settings name, with `run_ids` from `Trackers.state_dict`.

    Raises:
        ConfigError: metrics or curves cannot be written, or a user's own tracker cannot be found.
    """
    run, report = Path(config.checkpoint.ckpt_save_path), config.report
    logs = run / LOGS
    folder = Path(report.tracker_dir) if report.tracker_dir else logs
    try:
        trackers: dict[str, Tracker] = {METRICS_FILE: JsonLines(logs, restored_step)}
        for name in report.tracker:
            make = load_plugin("tracker", TRACKERS.get(name, name))
            trackers[name] = make(TrackedRun(config, run.name, folder, restored_step, run_ids.get(name)))
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written to {logs}, or curves to {folder}: {error}. "
            "Give a --tracker_dir (and --ckpt_save_path) that this user may write."
        ) from None
    return Trackers(trackers)


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
        log.warning("%s: %d damaged lines are dropped", path, damaged)
    write_atomic(path, b"".join(line + b"\n" for line in kept))


def _step_of(line: bytes) -> float | None:
    """Returns the step of a report; None where the line is none."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int | float) else None
