"""Where a run starts: in which folder, from which checkpoint of it or of elsewhere, and how its tensors get into place.

    ckpt_save_path with {timestamp}   -> `settle_run_path`: the folder of the run
    that folder, ckpt_load_path       -> `find_checkpoint`: the newest that is good, or None
    what was found                    -> `load`: its tensors, into place; if they are damaged, the next is looked for

The save path wins over the load path: a job that is submitted again resumes itself, whatever it was first started from.
It is a checkpoint, sharded or full (`pt_files`), its four .pt files without a manifest, or the folder of a Hugging Face
Llama (`hf_import`). Of the last, and with weights_only, a run takes the weights alone and begins at step 0.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pretraining.checkpoint.manifest import (
    CHECKPOINTS,
    ITERATION_FILE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Manifest,
    committed_checkpoints,
    is_committed,
    read_document,
    read_manifest,
    run_of,
    shape_of,
    tensor_state,
)
from pretraining.config.recipes import dump_config, load_config
from pretraining.config.rules import check_config
from pretraining.config.training import CheckpointConfig, ModelConfig, RunConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings
from pretraining.errors import CheckpointError, ConfigError, DamagedError
from pretraining.files import exists, from_hub, is_file, is_folder, real_path, run_not_writable, write_atomic
from pretraining.model.hf import CONFIG_FILE as HUGGING_FACE_FILE
from pretraining.model.hf import MODEL_FILES

if TYPE_CHECKING:  # what finds a checkpoint needs no torch, which takes a second to import; what loads it does
    import torch

    from pretraining.checkpoint.reader import Files, TensorFiles
    from pretraining.model.llama import Llama

T = TypeVar("T")
AnyTrainConfig = TypeVar("AnyTrainConfig", bound=TrainConfig)

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
VOCABULARY_MULTIPLE = 128
SAVE_PATH, LOAD_PATH, RESUME = "--ckpt_save_path", "--ckpt_load_path", "--resume_from_checkpoint"
TIMESTAMP = "{timestamp}"
_TIME_FORMAT = "%Y%m%d-%H%M%S"
_WRITTEN_TIME = r"\d{8}-\d{6}"


# In which folder


def settle_run_path(config: TrainConfig, now: datetime | None = None) -> str | None:
    """Fills in the timestamp of the run's folder; call it on one rank, which tells the others.

    `--ckpt_save_path=runs/try.{timestamp}` makes runs/try.20261121-143005, in UTC, at the first start. A start with the
    same settings goes on in the newest such folder whose run is not finished, as a requeued job does. Other settings,
    or a finished run, make a new folder. To go on with changed settings, name the folder itself. A run that keeps
    nothing has no folder: None.

    Raises:
        CheckpointError: a new folder cannot be made.
    """
    pattern, there = config.checkpoint.ckpt_save_path, existing_run_path(config)
    if there is not None or pattern is None:
        return there
    moment = now or datetime.now(UTC)
    while True:
        folder = Path(pattern.replace(TIMESTAMP, moment.strftime(_TIME_FORMAT)))
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            moment += timedelta(seconds=1)  # another run began in the same second
        except OSError as error:
            raise run_not_writable(folder, error) from None


def existing_run_path(config: TrainConfig) -> str | None:
    """The folder that a start goes on in; None without one, or if `settle_run_path` would make one with a timestamp."""
    pattern = config.checkpoint.ckpt_save_path
    if pattern is None or TIMESTAMP not in pattern:
        return pattern
    for folder in folders_of(pattern):
        if _has_settings(folder, config) and not _is_finished(folder):
            return str(folder)
    return None


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
    form = re.compile(f"{first}(?P<time>{_WRITTEN_TIME})" + "(?P=time)".join(rest))
    found = []
    for folder in root.glob("*".join(glob.escape(part) for part in written)):
        match = form.fullmatch(str(folder.relative_to(root)))
        if match and is_folder(folder):
            found.append((match["time"], folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def _has_settings(folder: Path, config: TrainConfig) -> bool:
    """Return whether a folder's run was started with these settings, apart from its path and when to stop."""
    try:
        there = load_config(folder / CONFIG_FILE)
    except ConfigError:
        return False  # none were written, or by a version with other settings
    if config.data.sep_token is None:  # the run adopted its own
        there = replace(there, data=replace(there.data, sep_token=None))
    return _comparable(there) == _comparable(config)


def _comparable(config: TrainConfig) -> TrainConfig:
    return replace(
        config,
        run=replace(
            config.run,
            run_steps=None,
            dry_run=False,
            time_limit=None,  # the errors of a crash loop ask for this and the next by the same command
            max_starts_without_progress=RunConfig.max_starts_without_progress,
        ),
        checkpoint=replace(
            config.checkpoint,
            ckpt_save_path=CheckpointConfig.ckpt_save_path,
            init_from=CheckpointConfig.init_from,
            resume_from_checkpoint=CheckpointConfig.resume_from_checkpoint,
        ),
    )


def _is_finished(folder: Path) -> bool:
    for path in reversed(committed_checkpoints(folder)):
        try:
            return read_document(path).is_of_finished_run
        except CheckpointError:
            continue  # damaged: the start passes it over and says so
    return False


def make_run_folder(run: Path) -> None:
    """Makes the run's folder, unless it is there; a CheckpointError if it cannot be written."""
    try:
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_not_writable(run, error) from None


def check_run_folder(run: Path) -> None:
    """Raises the CheckpointError of `make_run_folder` where that is sure to fail, and makes nothing."""
    there = next(folder for folder in (run, *run.absolute().parents) if exists(folder))
    if not is_folder(there):
        raise run_not_writable(run, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there)))
    if not os.access(there, os.W_OK | os.X_OK):
        raise run_not_writable(run, PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there)))


def write_config(config: TrainConfig) -> None:
    """Write the settings of a start that was not refused into its folder, if any: the file can start the run again."""
    if config.checkpoint.ckpt_save_path is None:
        return
    run = Path(config.checkpoint.ckpt_save_path)
    try:
        write_atomic(run / CONFIG_FILE, dump_config(config))
    except OSError as error:
        raise run_not_writable(run, error) from None


# From which checkpoint


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint that a run can start from.

    Attributes:
        manifest: of a Hugging Face folder, what that of a checkpoint of it would be.
        is_own: whether it is of this run, and not of another one that this one starts from.
        passed_over: newer ones that are damaged, and how, a line each.
        weights_only: whether a run takes nothing but the weights from it, and begins at step 0.
        going_back: whether the run goes back to it, although it may have newer ones.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    passed_over: tuple[str, ...] = ()
    weights_only: bool = False
    going_back: bool = False

    @property
    def step(self) -> int:
        """Updates done where a run begins that starts from here."""
        return 0 if self.weights_only else self.manifest.step


def find_checkpoint(
    config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({}), back_to: Path | None = None
) -> CheckpointRef | None:
    """Finds the checkpoint to start from; None for a new run. A collective call, or one of a process alone.

    Its files are there and have their sizes; what is in them is not read.

    Args:
        damaged: checkpoints that are known not to be good, and what is wrong with them.
        back_to: the only one that will do, of the run's own; None = the newest good one.

    Raises:
        CheckpointError: a load path was named and holds no checkpoint, or there are some and all are damaged.
    """
    flag, paths = _on_rank_zero(lambda: _candidates(config)) if back_to is None else (RESUME, [back_to])
    is_own = flag == SAVE_PATH or back_to is not None
    faults: list[str] = []
    for path in paths:
        try:
            if path in damaged:
                raise CheckpointError(damaged[path])
            manifest = _on_rank_zero(partial(manifest_at, path))
        except CheckpointError as error:
            faults.append(str(error))
        else:
            weights_only = not manifest.data or (config.weights_only and not is_own)
            return CheckpointRef(path, manifest, is_own, tuple(faults), weights_only, back_to is not None)
    if not faults:
        return None
    source = back_to or Path((config.ckpt_save_path if is_own else _load_path(config)[1]) or "")
    if paths == [source]:  # the user named this one, so that no other will do
        raise CheckpointError(f"{faults[0]}. Name another checkpoint with {flag}.")
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(
        f"{flag}={source} holds {len(faults)} checkpoints, and none is good:\n{lines}\n"
        "Repair one, or give another --ckpt_save_path to start a new run."
    )


def _candidates(config: CheckpointConfig) -> tuple[str, list[Path]]:
    """The flag that leads to checkpoints, and these, newest first."""
    own = [] if config.ckpt_save_path is None else committed_checkpoints(Path(config.ckpt_save_path))
    if own:
        return SAVE_PATH, own[::-1]
    flag, path = _load_path(config)
    if path is None:
        return flag, []
    # A load path that is the save path, too, is a run's folder, and no name on the Hub.
    may_be_name = flag == LOAD_PATH and path != config.ckpt_save_path
    source = from_hub(path, MODEL_FILES, CheckpointError) if may_be_name else Path(path)
    if is_checkpoint(source) or is_hugging_face_folder(source):
        return flag, [source]
    found = committed_checkpoints(run_of(source))
    if not found:
        raise CheckpointError(
            f"{flag}={source} holds no complete checkpoint: it is neither one (a folder with {MANIFEST}) nor a "
            f"run with some in {CHECKPOINTS}/."
        )
    return flag, found[::-1]


def without_own_load_path(config: AnyTrainConfig) -> AnyTrainConfig:
    """Returns settings whose load path is left out where it leads into the run's own folder, and nothing is there yet.

    A script may name one folder as both paths, for its first start and for all later ones. A collective call.
    """
    load_path, run = config.checkpoint.ckpt_load_path, config.checkpoint.ckpt_save_path
    if load_path is None or run is None or not _on_rank_zero(lambda: _is_still_empty(Path(run), Path(load_path))):
        return config
    log.info("--ckpt_load_path=%s is in the run's own folder and holds no checkpoint yet: a new run begins", load_path)
    return replace(config, checkpoint=replace(config.checkpoint, ckpt_load_path=None))


def _is_still_empty(run: Path, source: Path) -> bool:
    """Whether a path is a run's folder or below it, and neither holds a checkpoint."""
    if is_checkpoint(source) or committed_checkpoints(run) or committed_checkpoints(run_of(source)):
        return False
    return is_within(source, run)


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or below it, links followed."""
    real = real_path(path)
    return real_path(folder) in (real, *real.parents)


def _load_path(config: CheckpointConfig) -> tuple[str, str | None]:
    """What a run without checkpoints starts from, and the flag that says so."""
    if config.ckpt_load_path is None and config.resume_from_checkpoint is not None:
        return RESUME, config.resume_from_checkpoint
    return LOAD_PATH, config.ckpt_load_path


def manifest_at(path: Path) -> Manifest:
    """Reads what a checkpoint is: from its manifest, from its four .pt files, or from a Hugging Face folder.

    Names and sizes of its files are compared; their content is not read.

    Raises:
        CheckpointError: it is damaged, or of no form that is read here.
    """
    return read_manifest(path) if is_file(path / MANIFEST) else document_at(path)


def document_at(path: Path) -> Manifest:
    """As `manifest_at`, without a look at the files that the manifest names."""
    if is_file(path / MANIFEST):
        return read_document(path)
    if is_file(path / ITERATION_FILE):
        from pretraining.checkpoint.pt_files import manifest_of_files

        return manifest_of_files(path)
    if is_hugging_face_folder(path):
        from pretraining.checkpoint.hf_import import manifest_of_folder

        return manifest_of_folder(path)
    return read_document(path)


def is_hugging_face_folder(path: Path) -> bool:
    """Whether a folder is meant to hold a Hugging Face model: it has a config.json."""
    return is_file(path / HUGGING_FACE_FILE)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one checkpoint, be it damaged, and not a run."""
    return is_folder(path) and (is_committed(path) or _is_of_ours(path))


def _is_of_ours(path: Path) -> bool:
    """Whether a folder holds a checkpoint, and not the model of another program."""
    return is_file(path / MANIFEST) or is_file(path / ITERATION_FILE)


def named_checkpoint(path: str) -> CheckpointRef:
    """Finds the checkpoint at a path, or the newest of the run there, in one process; a CheckpointError without one."""
    source = Path(path)
    if is_hugging_face_folder(source) and not is_file(source / MANIFEST):
        raise CheckpointError("a Hugging Face folder, not a checkpoint: `pretrain import` makes one of it", path=source)
    found = find_checkpoint(CheckpointConfig(ckpt_save_path=path, ckpt_load_path=path))
    assert found is not None  # a load path without a checkpoint is an error
    return found


def adopt_model(config: AnyTrainConfig) -> AnyTrainConfig:
    """Gives settings without a model_variant the dimensions of what the run starts from.

    A collective call, or one of a process alone. Dimensions that were given stay; the start refuses them if they
    differ. A vocabulary that was not given is that of what the run starts from, or big enough for the tokenizer.

    Raises:
        CheckpointError: there is nothing to start from at a load path, or it does not say what it is.
        ConfigError: the settings do not fit the model.
        DataError: the tokenizer cannot be read.
    """
    needs_vocabulary = config.model.vocab_size is None and config.data.tokenizer_path is not None
    if config.model.model_variant is not None and not needs_vocabulary:
        return config
    found = find_checkpoint(config.checkpoint)
    shape = None if found is None else shape_of(found.manifest)
    model = config.model
    if model.model_variant is None:
        model = ModelConfig(model_variant=DEFAULT_VARIANT) if shape is None else model_settings(shape)
    if needs_vocabulary:
        rows = _vocabulary_for(config.data.tokenizer_path or "") if shape is None else shape.vocab_size
        model = replace(model, vocab_size=rows)
    given = {
        field.name: getattr(config.model, field.name)
        for field in fields(model)
        if getattr(config.model, field.name) not in (None, ())
    }
    adopted = replace(config, model=replace(model, **given))
    check_config(adopted)
    return adopted


def adopt_separator(config: AnyTrainConfig, start: CheckpointRef | None) -> AnyTrainConfig:
    """Give settings without a sep_token that of the run they resume or, in a new run, of the prepared data.

    A collective call, or one of a process alone.

    Raises:
        ConfigError: datasets name different tokens.
        DataError: a prepare.json cannot be read.
    """
    from pretraining.data.storage.dataset_files import prepared_separator  # imports NumPy

    data = config.data
    if data.sep_token is not None or data.use_dummy_dataset:
        return config
    if start is not None and not start.weights_only:
        token = start.manifest.data.get("sep_token")
    else:
        token = _on_rank_zero(lambda: prepared_separator(data, config.evaluation.eval_datasets))
    adopted = replace(config, data=replace(data, sep_token=token))
    check_config(adopted)
    return adopted


def _vocabulary_for(tokenizer_path: str) -> int:
    """The size of an embedding for a tokenizer: of a multiple of 128 rows, matrix products are faster."""
    from pretraining.data.tokenizer import load_tokenizer

    entries = _on_rank_zero(lambda: load_tokenizer(tokenizer_path).vocab_size)
    rows = -(-entries // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if rows != entries:
        log.info("vocab_size  %s, for the %s entries of %s", f"{rows:,}", f"{entries:,}", tokenizer_path)
    return rows


def _on_rank_zero(function: Callable[[], T]) -> T:
    """As `on_rank_zero`; a process without torch has joined no others, and need not import it to learn that."""
    if "torch" not in sys.modules:
        return function()
    from pretraining.distributed.processes import on_rank_zero

    return on_rank_zero(function)


# Its tensors


def load(checkpoint: CheckpointRef, tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads tensors of a checkpoint of any form into place; a collective call that raises as `load_tensors`."""
    from pretraining.checkpoint.reader import load_tensors

    manifest = checkpoint.manifest if _is_of_ours(checkpoint.path) else None
    load_tensors(checkpoint.path, files_of(checkpoint), tensors, manifest)


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> tuple[CheckpointRef, Llama]:
    """Loads a model into one process: of a checkpoint, of a run's newest sound one, or of a Hugging Face folder.

    Returns:
        Where it comes from, and the model in evaluation mode.

    Raises:
        CheckpointError: there is no checkpoint, all are damaged, or it is of no Llama.
    """
    import torch

    from pretraining.model.llama import Llama

    damaged: dict[Path, str] = {}
    while True:
        found = find_checkpoint(CheckpointConfig(ckpt_save_path=path, ckpt_load_path=path), damaged)
        assert found is not None  # a load path without a checkpoint is an error
        with torch.device("meta"):
            model = Llama(shape_of(found.manifest))
        model.to_empty(device="cpu")
        model.tie_weights()
        try:
            load(found, tensor_state(dict(model.named_parameters()), None))
        except DamagedError as error:
            damaged[found.path] = str(error)
        else:
            return found, model.to(device=device, dtype=dtype).eval()


def open_tensors(checkpoint: CheckpointRef) -> TensorFiles:
    """The tensors of a checkpoint, compared with the manifest's checksums before use; raises as `TensorFiles`."""
    from pretraining.checkpoint.reader import TensorFiles

    return TensorFiles(checkpoint.path, files_of(checkpoint))


def files_of(checkpoint: CheckpointRef) -> Files:
    """The files that hold a checkpoint's tensors, with sizes and checksums where it has a manifest."""
    path = checkpoint.path
    if checkpoint.manifest.files or is_file(path / MANIFEST):
        return checkpoint.manifest.files
    if is_file(path / ITERATION_FILE):
        return dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE))
    from pretraining.checkpoint.hf_import import weight_files

    return dict.fromkeys(_on_rank_zero(lambda: weight_files(path)))
