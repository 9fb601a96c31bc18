"""The TensorBoard tracker: curves, and settings as text and as hyperparameters."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from pretraining.config.recipe_files import dump_config
from pretraining.observability.report_file import RecordFile
from pretraining.observability.trackers import TrackedRun, plain_settings

CURVES = ("loss", "evaluation_loss")
"""Curves beside the hyperparameters."""


class TensorBoard(RecordFile):
    """An event file of this process. A full disk would end TensorBoard's own writer, and all curves."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # here: the import is slow
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import hparams, text

        self._event, self._summary = Event, Summary
        identity = run.identity or secrets.token_hex(8)
        folder = _folder_of(run, identity)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        number = len(list(folder.glob(f"{name}.*")))  # of the starts of this process in this second
        super().__init__(folder / f"{name}.{number}.{identity}")
        self._add(file_version="brain.Event:2")
        if run.restored_step:  # makes TensorBoard hide an earlier process's later steps
            self._add(step=run.restored_step + 1, session_log=SessionLog(status=SessionLog.START))
        indented = "".join(f"    {line}\n" for line in dump_config(run.config).splitlines())  # Markdown code
        for summary in (text("settings", indented), *hparams(plain_settings(run.config), dict.fromkeys(CURVES, 0.0))):
            self._add(step=run.restored_step, summary=summary)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Add a point to each curve."""
        points = [
            self._summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None
        ]
        self._add(step=step, summary=self._summary(value=points))

    def _add(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = BytesIO()
        RecordWriter(record).write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self.append(record.getvalue())


def _folder_of(run: TrackedRun, identity: str) -> Path:
    """Return the folder of a run's event files: its logs or, in a `tracker_dir`, one with the run's name.

    Runs may share a `tracker_dir`, and TensorBoard draws the files of one folder as one run. The names of event files
    end with the id of their run.
    """
    if run.config.report.tracker_dir is None:
        return run.folder
    folder = run.folder / re.sub(r"^\.+$|/", "_", run.name)
    is_of_another = any(not path.name.endswith(identity) for path in folder.glob("*tfevents*"))
    return folder.with_name(f"{folder.name}-{identity}") if is_of_another else folder
