"""What happens to a run, a JSON object a line in <run>/logs/events.jsonl, which no start and no rollback rewrites.

    start | restart   a process begins with the run's folder; restart says what the start before has come to
    restore           what it goes on from
    phase             the first one of the data, and other datasets, weights or batch from the next step on
    skip              an update was left out
    checkpoint        one was committed
    evaluation        its loss
    rollback          the run goes back before updates that were left out
    sample            text that the model has written
    end               finished, preempted or failed; a killed process writes none

The parts that act add what they do, on rank 0; on other ranks nothing is kept. A line is one write at the end of the
file, so a kill leaves whole lines, or a piece of the last one, which the next start ends. Nothing
that trains reads the file; `pretrain report` shows it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pretraining.observability.report_file import RecordFile, Sink, line_sink
from pretraining.observability.trackers import LOGS

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class Events:
    """The events of a run; without `open`, as on other ranks than 0, they are not kept."""

    def __init__(self) -> None:
        self._sink: Sink | None = None

    def open(self, run: Path) -> None:
        """Keep events in a run's folder from now on; if they cannot be written, that is a warning."""
        path = run / LOGS / EVENTS_FILE
        try:
            path.parent.mkdir(exist_ok=True)
            file = RecordFile(path)
            if path.read_bytes()[-1:] not in (b"", b"\n"):
                file.append(b"\n")  # a killed process has left a piece of a line
            self._sink = line_sink(file)
        except OSError as error:
            log.warning("%s cannot be written (%s): what happens to the run is not kept", path, error.strerror or error)

    def add(self, event: str, step: int, **details: Any) -> None:
        """Append an event; `details` are JSON-able, and null if they are not known."""
        if self._sink is not None:
            self._sink.log(step, {"event": event, **details})

    def close(self) -> None:
        """Close the file."""
        if self._sink is not None:
            self._sink.close()
