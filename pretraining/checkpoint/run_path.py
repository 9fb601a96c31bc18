"""`{timestamp}` in the path of a run.

    --ckpt_save_path=runs/try.{timestamp}     the first start makes runs/try.20261121-143005, in UTC

A start with the same settings goes on in the newest such folder whose run is not finished: a job that was preempted,
requeued or restarted finds its run again, whatever its number is now. Other settings, or a finished run, make a new
folder. To go on with changed settings, name the folder itself.
"""

from __future__ import annotations

import glob
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pretraining.checkpoint.listing import committed_checkpoints, read_document
from pretraining.config.recipes import load_config
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.errors import CheckpointError, ConfigError

TIMESTAMP = "{timestamp}"
CONFIG_FILE = "config.yaml"
_FORMAT = "%Y%m%d-%H%M%S"
_WRITTEN = r"\d{8}-\d{6}"


def settle_run_path(config: TrainConfig, now: datetime | None = None) -> str:
    """The run's folder, with the timestamp filled in; call it on one rank, which tells the others.

    Args:
        config: of the run.
        now: the time, for a new folder, which is made at once so that no other start takes the same name.

    Raises:
        CheckpointError: a new folder cannot be made.
    """
    pattern = config.checkpoint.ckpt_save_path
    if TIMESTAMP not in pattern:
        return pattern
    for folder in folders_of(pattern):
        if _has_settings(folder, config) and not _is_finished(folder):
            return str(folder)
    moment = now or datetime.now(UTC)
    while True:
        folder = Path(pattern.replace(TIMESTAMP, moment.strftime(_FORMAT)))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            moment += timedelta(seconds=1)  # another run began in the same second
        except OSError as error:
            raise CheckpointError(
                f"--ckpt_save_path={folder} cannot be written: {error}. Give a folder that this user may write."
            ) from None
        else:
            return str(folder)


def newest_run_path(pattern: str) -> str:
    """The newest folder that a pattern made, whatever its settings; the pattern itself where it has made none."""
    folders = folders_of(pattern) if TIMESTAMP in pattern else []
    return str(folders[0]) if folders else pattern


def folders_of(pattern: str) -> list[Path]:
    """The folders that a pattern has made, the newest first."""
    path = Path(pattern)
    root = Path(path.anchor)
    written = str(path.relative_to(root)).split(TIMESTAMP)
    # The same time at each place: a pattern may hold it twice.
    first, *rest = (re.escape(part) for part in written)
    form = re.compile(f"{first}(?P<time>{_WRITTEN})" + "(?P=time)".join(rest))
    found = []
    for folder in root.glob("*".join(glob.escape(part) for part in written)):
        match = form.fullmatch(str(folder.relative_to(root)))
        if match and folder.is_dir():
            found.append((match["time"], folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _has_settings(folder: Path, config: TrainConfig) -> bool:
    """Whether the run in a folder was started with these settings; its own path, and when to stop, aside."""
    try:
        there = load_config(folder / CONFIG_FILE)
    except ConfigError:
        return False  # none were written, or by a version with other settings
    return _comparable(there) == _comparable(config)


def _comparable(config: TrainConfig) -> TrainConfig:
    return replace(
        config,
        run=replace(config.run, run_steps=None),
        checkpoint=replace(config.checkpoint, ckpt_save_path=CheckpointConfig.ckpt_save_path),
    )


def _is_finished(folder: Path) -> bool:
    """Whether the newest checkpoint is a final one."""
    for path in reversed(committed_checkpoints(folder)):
        try:
            return read_document(path).kind == "final"
        except CheckpointError:
            continue  # damaged: the start passes it over and says so
    return False
