"""The events of a run, one JSON object per line in <run>/logs/events.jsonl. No start or rollback rewrites the file.

    start | restart   a start of the run; a restart has the result of the previous start
    restore           the checkpoint that the run resumes from
    return            a return to an older checkpoint, which the user asked for
    settings          settings that the user has changed since the checkpoint
    skip_samples      samples that the user skips from here on
    phase             datasets, weights and batch size at the start, and after each change
    skip              a skipped update
    checkpoint        a committed checkpoint
    evaluation        the evaluation loss
    rollback          a return to a checkpoint before skipped updates
    sample            text that the model generated
    end               finished, preempted, failed, or refused (a mistake); a killed process writes none

Components add their own events; only rank 0 keeps them. Each line is one write, so a kill leaves at most one incomplete
line, which the next start terminates. `pretrain report` shows the events; training never reads them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pretraining.observability.report_file import LineFile, Sink
from pretraining.observability.trackers import LOGS

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class Events:
    """The events of a run. They are dropped without a call of `open`, which only rank 0 makes."""

    def __init__(self) -> None:
        self._sink: Sink | None = None

    def open(self, run: Path) -> None:
        """Write events to a run's folder from now on; a failure is a warning."""
        self.close()
        path = run / LOGS / EVENTS_FILE
        try:
            path.parent.mkdir(exist_ok=True)
            self._sink = LineFile(path).sink()
        except OSError as error:
            log.warning("%s cannot be written (%s): this start has no events", path, error.strerror or error)

    def add(self, event: str, step: int, **details: Any) -> None:
        """Append an event; `details` are JSON values, None if unknown."""
        if self._sink is not None:
            self._sink.log(step, {"event": event, **details})

    def close(self) -> None:
        """Close the file."""
        if self._sink is not None:
            self._sink.close()
