"""Folder of a run: its checkpoints and their names, its path, and the settings kept in it.

    <run>/checkpoints/step_1000_ckp/             committed: has a manifest, or is damaged
    <run>/checkpoints/step_1040_ckp.preempt/     committed; removed after a newer commit
    <run>/checkpoints/best -> step_900_ckp       lowest evaluation loss, or best by --best_by
    <run>/checkpoints/step_1100_ckp.1f9c.tmp/    being written, or left by an interrupted save
    <run>/checkpoints/set_aside_<time>/          checkpoints that the run has gone back from
    <run>/checkpoints/<any other name>/          the user's; a checkpoint if it has a manifest; never removed

Names are for people: the manifest says what a checkpoint is. Only folders with a name that saves give are ever removed.
A folder is a checkpoint if it has one of these files:

    manifest.json        saved by a run, sharded or full: the manifest names all files
    iter_state_dict.pt   the four .pt files of a full checkpoint, without a manifest (`pt_files`)
    config.json          a Hugging Face folder with weights alone (`hf_import`)
"""

from __future__ import annotations

import glob
import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import chain
from pathlib import Path

from pretraining.checkpoint.branches import Branches, number_of
from pretraining.checkpoint.manifest import FULL_FILES, ITERATION_FILE, MANIFEST, SHARD_SUFFIX, Manifest
from pretraining.checkpoint.stored_files import read_json_of, size_fault
from pretraining.config.fields import settings_of, values_of
from pretraining.config.recipe_files import RUN_CONFIG_FILE, dump_config, settings_in
from pretraining.config.run_recipe import comment_of_start
from pretraining.config.settings_files import read_text
from pretraining.config.training import TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import (
    checked_values,
    entries_of,
    exists,
    is_file,
    is_folder,
    parse_address,
    read_json,
    read_object,
    real_path,
    reason_of,
    write_atomic,
    writing_into,
)
from pretraining.model.hf import CONFIG_FILE

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
BEST = "best"
PREEMPT_SUFFIX = ".preempt"
UNFINISHED_SUFFIX = ".tmp"
SET_ASIDE = "set_aside_"
"""Prefix of folders with checkpoints that a run has gone back from."""
STATUS_FILE = "run_status.json"
"""Status of the run, with its id (`train/run_status.py`)."""

_SAVE_NAME = (
    r"(step_(?P<step>\d+)_ckp|tokens\(\d\.\d\de\d+\)(_tloss\(-?\d+\.\d{3}\))?(_vloss\(-?\d+\.\d{3}\))?_ckpt)"
    r"(\.preempt)?(\.step_(?P<also>\d+))*"
)
"""Names of `checkpoint_name` and `distinct_name`."""
_COMMITTED = re.compile(_SAVE_NAME)
_UNFINISHED = re.compile(rf"{_SAVE_NAME}\.[0-9a-f]{{4}}\.tmp")
"""Names of `temporary_name`."""

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


@dataclass(frozen=True)
class Copy:
    """Complete checkpoint in an object store; its bytes are not compared with their checksums yet.

    Attributes:
        address: address of the store, possibly with a query.
        folder: folder of its files in the store; "" if the address is that of the checkpoint.
    """

    address: str
    folder: str
    manifest: Manifest

    def __str__(self) -> str:
        """Return the address of the checkpoint, without a query."""
        return f"{parse_address(self.address).place}/{self.folder}".rstrip("/")

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        return str(self).rpartition("/")[2]


@dataclass(frozen=True)
class Checkpoint:
    """Committed checkpoint, possibly damaged, with the facts for listings, retention and starts.

    Attributes:
        step: from the manifest or, if that is unreadable, from the name; -1 if neither has it.
        has_save_name: whether the name is that of its save; otherwise a user has copied or renamed the checkpoint.
        kind: None if the manifest is unreadable.
        cost: `Manifest.cost_of_step`, lowest in the best checkpoint.
        decided_by: definition of what the cost depends on; others are not compared with it.
        skipped_in_a_row: skipped updates just before the checkpoint.
        branches: of the run, up to the checkpoint.
        run_id: id of the run that saved it.
        is_here: whether the run's folder holds it, possibly damaged; else only the mirror does.
        copy: copy in the mirror.
    """

    path: Path
    step: int
    has_save_name: bool = True
    kind: str | None = None
    cost: float | None = None
    decided_by: tuple[str, ...] = ()
    skipped_in_a_row: int = 0
    branches: Branches = ()
    run_id: str = ""
    is_here: bool = True
    copy: Copy | None = None


def committed_checkpoints(run: Path) -> list[Checkpoint]:
    """Return all committed checkpoints in a run's folder, the highest step last, whatever run they belong to.

    A checkpoint without a manifest is included if its name says that it was committed.
    """
    return sorted((checkpoint_at(path) for path in _folders(run) if is_committed(path)), key=_place_in_list)


def _place_in_list(checkpoint: Checkpoint) -> tuple[int, bool, bool, bool, str]:
    """Return the key that sorts checkpoints by step.

    Within a step, a preemption checkpoint was saved first, a replaced one has the second name, and a user's copy comes
    before its original.
    """
    name = _COMMITTED.fullmatch(checkpoint.path.name)
    is_second = name is not None and name["also"] is not None
    is_last = checkpoint.path.suffix != PREEMPT_SUFFIX
    return checkpoint.step, is_last, name is not None, not is_second, checkpoint.path.name


def by_age(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints as the rule for one place orders them, the newest last."""
    return sorted(checkpoints, key=lambda checkpoint: (number_of(checkpoint), *_place_in_list(checkpoint)))


def run_id_of(run: Path, checkpoints: Sequence[Checkpoint] | None = None) -> str:
    """Return the id of the run in a folder; empty if it has none.

    It is the id in run_status.json or, if no checkpoint has that id, the id of the newest checkpoint.

    Args:
        checkpoints: of the folder and of its mirror; None = those in the folder.
    """
    saved = by_age(committed_checkpoints(run) if checkpoints is None else checkpoints)
    ids = [checkpoint.run_id for checkpoint in saved if checkpoint.kind is not None]
    recorded = ""
    with suppress(OSError, ValueError, KeyError):
        recorded = str(checked_values(read_json(run / STATUS_FILE))["run_id"])
    return recorded if recorded in ids or not ids else ids[-1]


def checkpoints_of_run(run: Path) -> list[Checkpoint]:
    """Return the checkpoints in a run's folder that this run has saved, the newest last; and unreadable ones."""
    here = by_age(committed_checkpoints(run))
    run_id = run_id_of(run, here)
    return [checkpoint for checkpoint in here if checkpoint.kind is None or checkpoint.run_id == run_id]


def checkpoints_set_aside(run: Path) -> list[Path]:
    """Return the checkpoints that the run has set aside, in order."""
    aside = [path for path in _folders(run) if path.name.startswith(SET_ASIDE)]
    return sorted(path for folder in aside for path in entries_of(folder))


def checkpoint_at(path: Path) -> Checkpoint:
    """Return the committed checkpoint at a path; the manifest is read again only if it has changed."""
    try:
        status = (path / (form_of(path) or MANIFEST)).stat()
        return _read(path, status.st_mtime_ns, status.st_size, status.st_ino)
    except (OSError, CheckpointError):
        match = _COMMITTED.fullmatch(path.name)
        return Checkpoint(path, int((match["step"] or match["also"] or -1) if match else -1), match is not None)


@lru_cache(maxsize=4096)
def _read(path: Path, modified_ns: int, size: int, inode: int) -> Checkpoint:
    # Cached, since a run that keeps everything would read a thousand manifests at each save.
    return checkpoint_from(path, read_document(path))


def checkpoint_from(path: Path, manifest: Manifest) -> Checkpoint:
    """Return the checkpoint of a manifest; the path may be that of a copy in a store."""
    name = re.sub(rf"(\.step_{manifest.step})+$", "", path.name)  # of `distinct_name`
    return Checkpoint(
        path,
        manifest.step,
        has_save_name=name in [checkpoint_name(style, manifest) for style in ("step", "tokens")],
        kind=manifest.kind,
        cost=manifest.cost_of_step,
        decided_by=manifest.decided_by,
        skipped_in_a_row=manifest.skipped_in_a_row,
        branches=manifest.branches,
        run_id=manifest.run_id,
    )


def is_committed(path: Path) -> bool:
    """Return whether a folder is a committed checkpoint, possibly damaged: it has a manifest or a save's name."""
    is_named = _COMMITTED.fullmatch(path.name) is not None
    return is_named or (_UNFINISHED.fullmatch(path.name) is None and is_file(path / MANIFEST))


def unfinished_saves(run: Path) -> list[Path]:
    """Return the folders of running or interrupted saves, in order; the next save removes them."""
    return sorted(path for path in _folders(run) if _UNFINISHED.fullmatch(path.name) and not path.is_symlink())


def run_of(path: Path) -> Path:
    """Return the run's folder of a path that is the folder or its checkpoints/."""
    return path.parent if path.name == CHECKPOINTS else path


def _folders(run: Path) -> list[Path]:
    folder = run / CHECKPOINTS
    return [path for path in entries_of(folder) if path.name != BEST and is_folder(path)] if is_folder(folder) else []


# Forms of a checkpoint, and who reads what is in them


def _read_saved(folder: Path) -> Manifest:
    return Manifest.parse(read_json_of(folder, MANIFEST), str(folder / MANIFEST))


def _read_pt(folder: Path) -> Manifest:
    from pretraining.checkpoint.pt_files import manifest_of_files  # imports torch, which takes a second

    return manifest_of_files(folder)


def _read_hugging_face(folder: Path) -> Manifest:
    from pretraining.checkpoint.hf_import import manifest_of_folder  # imports torch

    return manifest_of_folder(folder)


FORMS = {MANIFEST: _read_saved, ITERATION_FILE: _read_pt, CONFIG_FILE: _read_hugging_face}
"""Readers of manifests, by a file that each folder of the form has; the first one counts."""


def form_of(folder: Path) -> str | None:
    """Return the form of the checkpoint in a folder, by its file; None if it is none, or has lost its manifest."""
    return next((marker for marker in FORMS if is_file(folder / marker)), None)


def read_document(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint of any form, without looking at files that a saved manifest names.

    Raises:
        CheckpointError: the checkpoint is damaged, or of an unknown form.
    """
    form = form_of(folder)
    if form is None:
        raise CheckpointError(f"damaged: its {MANIFEST} is missing", path=folder)
    return FORMS[form](folder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check names and sizes of its files; their content is not read.

    Raises:
        CheckpointError: as in `read_document`; or a file is missing or of another size.
    """
    manifest = read_document(folder)
    sizes = (size_fault(folder / name, entry) for name, entry in manifest.recorded_files.items())
    fault = next(chain(misnamed_files(folder, manifest), filter(None, sizes)), None)
    if fault is not None:
        raise CheckpointError(fault)
    return manifest


def misnamed_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a message for each name in a manifest that is no tensor file of the folder; other files may be there."""
    for name in manifest.recorded_files:
        if Path(name).name != name or not (name.endswith(SHARD_SUFFIX) or name in FULL_FILES):
            yield f"{folder / MANIFEST} names {name!r}, which is no tensor file of this folder"


# Names that saves give


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint under `ckpt_name=step`."""
    return run / CHECKPOINTS / f"step_{step}_ckp"


def checkpoint_name(style: str, manifest: Manifest) -> str:
    """Return the name of a checkpoint's folder in style "step" or "tokens"; the latter has tokens and losses."""
    suffix = PREEMPT_SUFFIX if manifest.kind == "preempt" else ""
    if style == "step":
        return f"step_{manifest.step}_ckp{suffix}"
    mantissa, _, exponent = f"{manifest.tokens_seen:.2e}".partition("e")
    losses = {"tloss": manifest.loss, "vloss": manifest.evaluation_loss}
    losses_text = "".join(f"_{name}({loss:.3f})" for name, loss in losses.items() if loss is not None)
    return f"tokens({mantissa}e{int(exponent)}){losses_text}_ckpt{suffix}"


def temporary_name(folder: Path) -> Path:
    """Return a new name each time, so that a process that resumes an old save does not write into a new one."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(2)}{UNFINISHED_SUFFIX}")


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, renamed first so that a partly removed one is never read; warn if it fails.

    A network file system may refuse while a file is open somewhere. The run continues, and the next save tries again.
    """
    try:
        hidden = folder if folder.suffix == UNFINISHED_SUFFIX else folder.rename(temporary_name(folder))
        if hidden.is_symlink():  # remove the link, not its target
            hidden.unlink()
        else:
            shutil.rmtree(hidden)
    except OSError as error:
        log.warning("%s cannot be removed (%s): the next save tries again", folder, reason_of(error))


def distinct_name(name: str, step: int) -> str:
    """Return the name for a step whose usual name another step has, which rounding of tokens may cause."""
    return f"{name}.step_{step}"


def free_path(run: Path, checkpoint: Checkpoint) -> Path:
    """Return a path among a run's checkpoints for one that was set aside, with the first name that is free."""
    path = run / CHECKPOINTS / checkpoint.path.name
    while exists(path):
        path = path.with_name(distinct_name(path.name, checkpoint.step))
    return path


# Path of the folder


def find_run_folder(config: TrainConfig) -> str | None:
    """Return the path of the run's folder: that of an unfinished run with these settings, if it has a {timestamp}.

    A requeued job resumes in the newest such folder, else it takes a folder that a refused start has left, else
    {timestamp} stays in the path. To resume with other settings, name the folder itself.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is None or TIMESTAMP not in pattern:
        return pattern
    for folder in folders_of(pattern):
        readable = [checkpoint for checkpoint in checkpoints_of_run(folder) if checkpoint.kind is not None]
        is_finished = bool(readable) and read_document(readable[-1].path).is_of_finished_run
        if _has_settings(folder, config) and not is_finished:
            return str(folder)
    return next((str(folder) for folder in folders_of(pattern) if _is_of_refused_start(folder)), pattern)


def _is_of_refused_start(folder: Path) -> bool:
    """Return whether a start has ended in a folder before any settings were accepted there."""
    has_failed = read_object(folder / STATUS_FILE).get("status") == "failed"
    return has_failed and not exists(folder / RUN_CONFIG_FILE) and not _folders(folder)


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
    """Return the newest folder of a {timestamp} pattern that has begun, whatever its settings; else the path itself."""
    folders = (
        [folder for folder in folders_of(pattern) if is_file(folder / RUN_CONFIG_FILE)] if TIMESTAMP in pattern else []
    )
    return str(folders[0]) if folders else pattern


def folders_of(pattern: str) -> list[Path]:
    """Return the folders of a {timestamp} pattern, the newest first."""
    root = Path(Path(pattern).anchor)
    written = str(Path(pattern).relative_to(root))
    form = re.compile(re.escape(written).replace(re.escape(TIMESTAMP), _WRITTEN_TIME))
    paths = [path for path in root.glob(glob.escape(written).replace(TIMESTAMP, "*")) if is_folder(path)]
    return sorted((path for path in paths if form.fullmatch(str(path.relative_to(root)))), reverse=True)


def _has_settings(folder: Path, config: TrainConfig) -> bool:
    recorded = last_settings(folder)
    if recorded is None:
        return False
    saved = values_of(recorded)
    settings, given = settings_of(TrainConfig), values_of(config)
    begins_elsewhere = config.checkpoint.ckpt_load_path or config.checkpoint.resume_from_checkpoint
    if given["model_variant"] is None and begins_elsewhere is None:
        given["model_variant"] = DEFAULT_VARIANT
    # The settings in a folder are complete: a start fills in what the user leaves open.
    model = vars(config.model) if given["model_variant"] is None else ("vocab_size",)
    left_open = {name for name in (*FROM_DATA, *model) if given[name] in (None, ())}
    return all(
        value == saved[name] or (settings[name].is_path and _real(value) == _real(saved[name]))
        for name, value in given.items()
        if name not in left_open | _NOT_COMPARED
    )


def _real(value: str | tuple[str, ...] | None) -> list[Path]:
    """Return the real paths of a setting: a start from another working folder records an absolute path."""
    return [real_path(Path(each)) for each in ((value,) if isinstance(value, str) else value or ())]


def last_settings(run: Path) -> TrainConfig | None:
    """Return the settings of the last accepted start of the run in a folder; None if they are unknown."""
    try:
        return settings_in(read_text(run / RUN_CONFIG_FILE, RUN_CONFIG_FILE), RUN_CONFIG_FILE)
    except ConfigError:
        return None


def write_config(config: TrainConfig) -> None:
    """Write the settings of an accepted start into the run's folder; the file can start the run again."""
    run = config.checkpoint.folder
    write_atomic(run / RUN_CONFIG_FILE, comment_of_start(run) + dump_config(config))
