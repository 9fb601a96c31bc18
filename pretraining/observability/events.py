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
import os
from pathlib import Path
from typing import Any

from pretraining.files import check_regular, exists
from pretraining.observability.report_file import JsonLineFile
from pretraining.observability.trackers import LOGS, ReportSink

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class Events:
    """The events of a run; without `open`, as on other ranks than 0, they are not kept."""

    def __init__(self) -> None:
        self._sink: ReportSink | None = None

    def open(self, run: Path) -> None:
        """Keep events in a run's folder from now on; if they cannot be written, that is a warning."""
        path = run / LOGS / EVENTS_FILE
        try:
            path.parent.mkdir(exist_ok=True)
            _end_last_line(path)
            self._sink = ReportSink(EVENTS_FILE, JsonLineFile(path))
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


def _end_last_line(path: Path) -> None:
    """End the line that a killed process has left without an end, so that the next event has a line of its own."""
    if not exists(path):
        return
    check_regular(path)
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
