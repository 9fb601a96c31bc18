"""Path of a run's folder: {timestamp} in the path, the folder itself, and the settings kept in it."""

from __future__ import annotations

import glob
import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pretraining.checkpoint.forms import read_document
from pretraining.checkpoint.run_folder import committed_checkpoints
from pretraining.config.fields import settings_of, values_of
from pretraining.config.recipes import RUN_CONFIG_FILE, dump_config, load_config, settings_in
from pretraining.config.run_recipe import comment_of_start
from pretraining.config.settings_files import read_text
from pretraining.config.training import TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import absolute_if_local, is_folder, real_path, write_atomic, writing_into
from pretraining.progress import DefaultDuration

TIMESTAMP = "{timestamp}"
_TIME_FORMAT = "%Y%m%d-%H%M%S"
_WRITTEN_TIME = r"\d{8}-\d{6}"
FROM_DATA = ("sep_token", "bos_token", "tokenizer_path")
"""Settings that a new run takes from the prepared data, and a resumed run from its checkpoint."""
_NOT_COMPARED = frozenset(
    {
        *("ckpt_save_path", "init_from", "resume_from_checkpoint", "run_steps", "dry_run"),
        *("time_limit", "max_starts_without_progress"),  # the error of a crash loop asks to change these
        *("use_profiler", "profile_steps", "profile_interval"),  # of one start: `config/run_recipe.py`
    }
)


def find_run_folder(config: TrainConfig) -> str | None:
    """Return the path of the run's folder: that of an unfinished run with these settings, if it has a {timestamp}.

    A requeued job resumes in the newest such folder. Without one, {timestamp} stays in the path. To resume with other
    settings, name the folder itself.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is None or TIMESTAMP not in pattern:
        return pattern
    for folder in folders_of(pattern):
        if _has_settings(folder, config) and not _is_finished(folder):
            return str(folder)
    return pattern


def make_run_path(pattern: str | None, now: datetime | None = None) -> str | None:
    """Make the folder of a new run for a path with {timestamp}: runs/try.20261121-143005, in UTC; else do nothing.

    Call it on one rank, which sends the result to the others.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    if pattern is None or TIMESTAMP not in pattern:
        return pattern
    moment = now or datetime.now(UTC)
    while True:
        folder = Path(pattern.replace(TIMESTAMP, moment.strftime(_TIME_FORMAT)))
        with writing_into(folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return str(folder)
        moment += timedelta(seconds=1)  # another run began in the same second


def newest_run_path(pattern: str) -> str:
    """Return the newest folder of a {timestamp} pattern, whatever its settings; else the path itself."""
    folders = folders_of(pattern) if TIMESTAMP in pattern else []
    return str(folders[0]) if folders else pattern


def folders_of(pattern: str) -> list[Path]:
    """Return the folders of a {timestamp} pattern, the newest first."""
    root = Path(Path(pattern).anchor)
    written = str(Path(pattern).relative_to(root))
    form = re.compile(re.escape(written).replace(re.escape(TIMESTAMP), _WRITTEN_TIME))
    found = root.glob(glob.escape(written).replace(TIMESTAMP, "*"))
    return sorted(
        (each for each in found if form.fullmatch(str(each.relative_to(root))) and is_folder(each)), reverse=True
    )


def _has_settings(folder: Path, config: TrainConfig) -> bool:
    try:
        saved = values_of(load_config(folder / RUN_CONFIG_FILE))
    except ConfigError:
        return False  # there is no file, or a version with other settings wrote it
    saved["tokenizer_path"] = absolute_if_local(saved["tokenizer_path"])  # earlier versions recorded it as typed
    settings, given = settings_of(TrainConfig), values_of(config)
    begins_elsewhere = config.checkpoint.ckpt_load_path or config.checkpoint.resume_from_checkpoint
    if given["model_variant"] is None and begins_elsewhere is None:
        given["model_variant"] = DEFAULT_VARIANT
    # The settings in a folder are complete: a start fills in what the user leaves open.
    model = vars(config.model) if given["model_variant"] is None else ("vocab_size",)
    left_open = {name for name in (*FROM_DATA, *model) if given[name] in (None, ())}
    if isinstance(given["warmup_steps"], DefaultDuration):  # a start shortens a default of another system
        left_open.add("warmup_steps")
    return all(
        value == saved[name] or (settings[name].is_path and _real(value) == _real(saved[name]))
        for name, value in given.items()
        if name not in left_open | _NOT_COMPARED
    )


def _real(value: str | tuple[str, ...] | None) -> list[Path]:
    """Return the real paths of a setting: a start from another working folder records an absolute path."""
    return [real_path(Path(each)) for each in ((value,) if isinstance(value, str) else value or ())]


def _is_finished(folder: Path) -> bool:
    for each in reversed(committed_checkpoints(folder)):
        try:
            return read_document(each.path).is_of_finished_run
        except CheckpointError:
            continue  # damaged: the start skips and names it
    return False


def last_settings(run: Path) -> TrainConfig | None:
    """Return the settings of the last accepted start of the run in a folder; None if they are unknown."""
    try:
        return settings_in(read_text(run / RUN_CONFIG_FILE, RUN_CONFIG_FILE), RUN_CONFIG_FILE)
    except ConfigError:
        return None


def write_config(config: TrainConfig) -> None:
    """Write the settings of an accepted start into the run's folder, if any; the file can start the run again."""
    if config.checkpoint.ckpt_save_path is None:
        return
    run = config.checkpoint.folder
    with writing_into(run):
        write_atomic(run / RUN_CONFIG_FILE, comment_of_start(run) + dump_config(config))
