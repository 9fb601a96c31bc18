"""Where reports are kept: metrics.jsonl always, and the trackers that `--tracker` names.

At a resume, what was logged after the restored step is dropped: those steps are reported again. Checkpoints keep the id
by which a tracker, such as an online service, knows the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pretraining.config.plugins import TRACKERS, load_plugin
from pretraining.config.training import TrainConfig
from pretraining.errors import ConfigError
from pretraining.files import check_regular, exists, parse_json, write_atomic

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


class JsonLines:
    """One JSON object a report; a line is written whole, so a reader never sees half a report."""

    def __init__(self, folder: Path, restored_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if exists(path):
            _drop_lines_after(path, restored_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Appends a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        # TensorBoard hides what an earlier process logged from this step on.
        self._writer = SummaryWriter(str(run.folder), purge_step=run.restored_step + 1 if run.restored_step else None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


@dataclass
class Trackers:
    """All trackers of a run, by what `--tracker` says; none on other ranks than 0."""

    by_name: dict[str, Tracker] = field(default_factory=dict)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hands the values of a step to all."""
        for tracker in self.by_name.values():
            tracker.log(step, values)

    def close(self) -> None:
        """Closes all."""
        for tracker in self.by_name.values():
            tracker.close()

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
    check_regular(path)
    kept = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                is_past = parse_json(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                continue  # the line that a killed process was writing
            if is_past:
                kept.append(line)
    write_atomic(path, "".join(kept))
