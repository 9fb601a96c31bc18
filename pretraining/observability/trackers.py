"""Where reports are kept: metrics.jsonl always, and the trackers that `--tracker` names.

At a resume, what was logged after the restored step is dropped: those steps are about to be reported again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from pretraining.config.training import ReportConfig
from pretraining.errors import ConfigError
from pretraining.files import write_atomic

LOGS = "logs"
METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """A place that reports go to."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Keeps the values of a step; None is unknown."""

    def close(self) -> None:
        """Writes out what is buffered."""


class JsonLines:
    """One JSON object a report; a line is written whole, so a reader never sees half a report."""

    def __init__(self, folder: Path, restored_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if path.exists():
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

    def __init__(self, folder: Path, restored_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        # TensorBoard hides what an earlier process logged from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=restored_step + 1 if restored_step else None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Adds a point to each curve."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def open_trackers(report: ReportConfig, logs: Path, restored_step: int) -> list[Tracker]:
    """Opens metrics.jsonl in `logs`, and the trackers that the settings name; `restored_step` is 0 for a new run.

    Raises:
        ConfigError: metrics or curves cannot be written.
    """
    tracker_dir = Path(report.tracker_dir) if report.tracker_dir else logs
    try:
        trackers: list[Tracker] = [JsonLines(logs, restored_step)]
        if "tensorboard" in report.tracker:
            trackers.append(TensorBoard(tracker_dir, restored_step))
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written to {logs}, or curves to {tracker_dir}: {error}. "
            "Give a --tracker_dir (and --ckpt_save_path) that this user may write."
        ) from None
    return trackers


def _drop_lines_after(path: Path, step: int) -> None:
    kept = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                is_past = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                continue  # the line that a killed process was writing
            if is_past:
                kept.append(line)
    write_atomic(path, "".join(kept))
