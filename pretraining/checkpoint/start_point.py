"""What a run may start from besides nothing, and its tensors.

    checkpoint, sharded (`store`) or full (`full`)    -> everything, or with weights_only its weights
    four .pt files without a manifest                 -> the same
    folder of a Hugging Face Llama (`hf_folder`)      -> its weights

A run of weights alone begins at step 0 with an optimizer, a learning rate and a position in the data of its own.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from pretraining.checkpoint.hf_import import is_hugging_face_folder, manifest_of_folder, open_folder
from pretraining.checkpoint.listing import CHECKPOINTS, MANIFEST, committed_checkpoints, read_document, read_manifest
from pretraining.checkpoint.loading import check_files, load_tensors
from pretraining.checkpoint.pt_files import ITERATION_FILE, FullFiles, is_full, manifest_of_files
from pretraining.checkpoint.sources import TensorFiles, TensorSource, fill
from pretraining.checkpoint.state import Manifest, shape_of
from pretraining.config.recipes import load_config
from pretraining.config.rules import check_config
from pretraining.config.training import CheckpointConfig, ModelConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings
from pretraining.distributed.processes import on_every_rank, on_rank_zero
from pretraining.errors import CheckpointError, ConfigError

Run = TypeVar("Run", bound=TrainConfig)


@dataclass(frozen=True)
class StartPoint:
    """What a run starts from.

    Attributes:
        checkpoint: its place and manifest; that of a Hugging Face folder says what a checkpoint of it would.
        weights_only: whether nothing but the weights is taken.
    """

    checkpoint: CheckpointRef
    weights_only: bool

    @property
    def step(self) -> int:
        """Updates done where the run starts."""
        return 0 if self.weights_only else self.checkpoint.manifest.step


def find_start_point(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> StartPoint | None:
    """What a run with these settings starts from, or None for initial weights; a collective call.

    Args:
        config: where to look.
        damaged: checkpoints that loading has found damaged, and how.

    Raises:
        CheckpointError: a load path was named and holds nothing to start from, or all there is is damaged.
    """
    foreign = on_rank_zero(lambda: _foreign(config))
    found = foreign or find_checkpoint(config, damaged)
    if found is None:
        return None
    has_state = bool(found.manifest.data)
    return StartPoint(found, weights_only=not has_state or (config.weights_only and not found.is_own))


def named_checkpoint(path: str) -> CheckpointRef:
    """The checkpoint at a path, or the newest of the run there, its files not read; without other processes.

    Raises:
        CheckpointError: there is none.
    """
    source = Path(path)
    if is_hugging_face_folder(source) and not (source / MANIFEST).is_file():
        raise CheckpointError(f"{source} is a Hugging Face folder, not a checkpoint: `pretrain import` makes one of it")
    config = CheckpointConfig(ckpt_save_path=path, ckpt_load_path=path)
    found = _foreign(replace(config, ckpt_save_path="")) or find_checkpoint(config)
    assert found is not None  # a load path without a checkpoint is an error
    return found


def open_tensors(checkpoint: CheckpointRef, *, check_contents: bool = True) -> TensorSource:
    """The tensors of a checkpoint.

    Args:
        checkpoint: of any form.
        check_contents: compare files with the checksums of the manifest before they are used.

    Raises:
        CheckpointError: a file is missing, damaged or of another form.
    """
    files = {name: entry if check_contents else None for name, entry in checkpoint.manifest.files.items()}
    if is_full(files) or (checkpoint.path / ITERATION_FILE).is_file():
        return FullFiles(checkpoint.path, files)
    return TensorFiles(checkpoint.path, files) if files else open_folder(checkpoint.path).weights


def load(checkpoint: CheckpointRef, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors of a checkpoint of any form into place, whatever the layout; a collective call.

    Raises:
        DamagedError: a file is not what was written; the tensors hold anything.
        CheckpointError: a tensor is missing or of another shape.
    """
    files = checkpoint.manifest.files
    if files and not is_full(files):
        load_tensors(checkpoint.path, files, tensors)
        return
    check_files(checkpoint.path, files)
    on_every_rank(lambda: fill(tensors, open_tensors(checkpoint, check_contents=False)))


def adopt_model(config: Run) -> Run:
    """A run's settings with its model: without a model_variant, dimensions are those of what the run starts from.

    A collective call, or one of a process alone; no tensors are read. Dimensions that were given stay; where they
    differ, the start refuses them.

    Raises:
        CheckpointError: there is nothing to start from at a load path, or it does not say what it is.
        ConfigError: the settings do not fit the model.
    """
    if config.model.model_variant is not None:
        return config
    foreign = on_rank_zero(lambda: _foreign(config.checkpoint))
    found = foreign or find_checkpoint(config.checkpoint)
    model = ModelConfig(model_variant=DEFAULT_VARIANT) if found is None else model_settings(shape_of(found.manifest))
    given = {
        field.name: getattr(config.model, field.name)
        for field in fields(model)
        if getattr(config.model, field.name) not in (None, ())
    }
    adopted = replace(config, model=replace(model, **given))
    check_config(adopted)
    return adopted


def _foreign(config: CheckpointConfig) -> CheckpointRef | None:
    """The named folder where it has no manifest of its own and the run no checkpoint yet, or None."""
    if config.ckpt_load_path is None or (config.ckpt_save_path and committed_checkpoints(Path(config.ckpt_save_path))):
        return None
    source = Path(config.ckpt_load_path)
    if (source / MANIFEST).is_file():
        return None
    if (source / ITERATION_FILE).is_file():
        return CheckpointRef(source, manifest_of_files(source), is_own=False)
    if is_hugging_face_folder(source):
        return CheckpointRef(source, manifest_of_folder(source), is_own=False)
    return None


# TODO(merge): was pretraining.checkpoint.start_point
# Which checkpoint a run starts from: the newest that is good.
#
#     rank 0 lists candidates, newest first -> manifest, presence and sizes of its files, on rank 0 -> the first
#     good one
#
# Loading it compares every byte (`loading`); where it turns out to be damaged, the next one is looked for. At a start
# the
# save path wins over the load path: a job that is submitted again resumes itself, whatever it was first started from.


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint that a run can start from.

    Attributes:
        path: its folder.
        manifest: its contents.
        is_own: whether it is the run's own, and not one of another run that a new one starts from.
        passed_over: newer ones that are damaged, and how, a line each.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidates:
    """Where to look, newest first.

    Attributes:
        paths: of checkpoints.
        source: the flag that led here.
        is_own: whether they are the run's own.
        is_exact: whether the user named this one checkpoint, so that no other will do.
    """

    paths: list[Path]
    source: str
    is_own: bool = False
    is_exact: bool = False


def find_checkpoint(
    config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})
) -> CheckpointRef | None:
    """The checkpoint to start from, or None for a new run; a collective call, or one of a process alone.

    Its files are there and have their sizes; what is in them is not read.

    Args:
        config: where to look.
        damaged: checkpoints that are known not to be good, and what is wrong with them.

    Raises:
        CheckpointError: a load path was named and holds no checkpoint, or there are some and all are damaged.
    """
    candidates = on_rank_zero(lambda: _list_candidates(config))
    faults: list[str] = []
    for path in candidates.paths:
        try:
            if path in damaged:
                raise CheckpointError(damaged[path])
            manifest = on_rank_zero(lambda path=path: read_manifest(path))  # type: ignore[misc]
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return CheckpointRef(path, manifest, candidates.is_own, tuple(faults))
    if not faults:
        return None
    if candidates.is_exact:
        raise CheckpointError(f"{faults[0]}. Name another checkpoint with {candidates.source.partition('=')[0]}.")
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(
        f"{candidates.source} holds {len(faults)} checkpoints, and none is good:\n{lines}\n"
        "Repair one, or give another --ckpt_save_path to start a new run."
    )


def _list_candidates(config: CheckpointConfig) -> _Candidates:
    own = committed_checkpoints(Path(config.ckpt_save_path))
    if own:
        return _Candidates(own[::-1], f"--ckpt_save_path={config.ckpt_save_path}", is_own=True)
    if config.ckpt_load_path is None:
        return _Candidates([], "")
    source, flag = Path(config.ckpt_load_path), f"--ckpt_load_path={config.ckpt_load_path}"
    if (source / MANIFEST).is_file():
        return _Candidates([source], flag, is_exact=True)
    run = source.parent if source.name == CHECKPOINTS else source
    found = committed_checkpoints(run)
    if not found:
        raise CheckpointError(
            f"{flag} holds no complete checkpoint: it is neither one (a folder with {MANIFEST}) nor a run with some in "
            f"{CHECKPOINTS}/."
        )
    return _Candidates(found[::-1], flag)


# TODO(merge): was pretraining.checkpoint.start_point
# `{timestamp}` in the path of a run.
#
#     --ckpt_save_path=runs/try.{timestamp}     the first start makes runs/try.20261121-143005, in UTC
#
# A start with the same settings goes on in the newest such folder whose run is not finished: a job that was preempted,
# requeued or restarted finds its run again, whatever its number is now. Other settings, or a finished run, make a new
# folder. To go on with changed settings, name the folder itself.

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
