"""Where reports are kept: metrics.jsonl always, and what `--tracker` names.

A tracker takes (step, values). At a resume, what was logged after the restored step is dropped: those steps are about
to be reported again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """A place that reports go to."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Keep the values of a step; those that are None are unknown."""

    def close(self) -> None:
        """Write out what is buffered."""


class JsonLines:
    """One JSON object a report; a line is written whole, so a reader never sees half a report."""

    def __init__(self, folder: Path, restored_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if path.exists():
            _drop_lines_after(path, restored_step)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: Path, restored_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

        # TensorBoard hides what an earlier process logged from this step on.
        self._writer = SummaryWriter(str(folder), purge_step=restored_step + 1 if restored_step else None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add a point to each curve."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def open_trackers(names: tuple[str, ...], logs: Path, tracker_dir: Path, restored_step: int) -> list[Tracker]:
    """metrics.jsonl in `logs`, and the trackers named, in `tracker_dir`; `restored_step` is 0 for a new run."""
    trackers: list[Tracker] = [JsonLines(logs, restored_step)]
    if "tensorboard" in names:
        trackers.append(TensorBoard(tracker_dir, restored_step))
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
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
