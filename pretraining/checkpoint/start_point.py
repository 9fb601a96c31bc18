"""Where a run starts: in which folder, from which checkpoint of it or of elsewhere, with which settings.

    ckpt_save_path with {timestamp}          -> `existing_run_path`, `with_run_path`: the folder of the run
    that folder, ckpt_load_path              -> `find_start`: the newest good checkpoint, or None
    settings, and what the run starts from   -> `resolve_run`: settings that leave nothing open
    a checkpoint                             -> `load`: its tensors, into place; if they are damaged, the next is found

A run goes on from the newest good checkpoint of its folder, so that a job which is submitted again resumes itself. An
empty folder begins from `ckpt_load_path`: a checkpoint, sharded or full (`pt_files`), its four .pt files without a
manifest, or the folder of a Hugging Face Llama (`hf_import`). Of the last, and with weights_only, a run takes the
weights alone and begins at step 0.
"""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
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
    check_same_model,
    committed_checkpoints,
    is_committed,
    read_document,
    read_manifest,
    run_of,
    shape_of,
    step_of,
    tensor_state,
)
from pretraining.checkpoint.rollback_file import ROLLBACK_FILE
from pretraining.config.fields import values_of
from pretraining.config.recipes import dump_config, load_config, settings_in
from pretraining.config.rules import check_config
from pretraining.config.training import CheckpointConfig, DataConfig, ModelConfig, TrainConfig
from pretraining.config.variants import DEFAULT_VARIANT, model_settings, resolve_shape
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
_WHERE_AND_HOW_LONG = frozenset(
    {
        *("ckpt_save_path", "init_from", "resume_from_checkpoint", "run_steps", "dry_run"),
        *("time_limit", "max_starts_without_progress"),  # the errors of a crash loop ask for these by the same command
    }
)


# In which folder


def existing_run_path(pattern: str, config: TrainConfig, ignored: frozenset[str] = frozenset()) -> str | None:
    """Return the newest folder that a {timestamp} made whose run has these settings and is not finished; None without.

    A requeued job resumes there. To resume with changed settings, name the folder itself.

    Args:
        ignored: settings that need not be the same.
    """
    for folder in folders_of(pattern):
        if _has_settings(folder, config, ignored | _WHERE_AND_HOW_LONG) and not _is_finished(folder):
            return str(folder)
    return None


def with_run_path(config: AnyTrainConfig, now: datetime | None = None) -> AnyTrainConfig:
    """Return settings whose {timestamp} is filled in, and make that folder: runs/try.20261121-143005, in UTC.

    Call it on one rank, which tells the others.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is None or TIMESTAMP not in pattern:
        return config
    moment = now or datetime.now(UTC)
    while True:
        folder = Path(pattern.replace(TIMESTAMP, moment.strftime(_TIME_FORMAT)))
        try:
            folder.mkdir(parents=True)
            return replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=str(folder)))
        except FileExistsError:
            moment += timedelta(seconds=1)  # another run began in the same second
        except OSError as error:
            raise run_not_writable(folder, error) from None


def newest_run_path(pattern: str) -> str:
    """Return the newest folder that a pattern made, whatever its settings; else the pattern itself."""
    folders = folders_of(pattern) if TIMESTAMP in pattern else []
    return str(folders[0]) if folders else pattern


def folders_of(pattern: str) -> list[Path]:
    """Return the folders that a pattern has made, the newest first."""
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


def _has_settings(folder: Path, config: TrainConfig, ignored: frozenset[str]) -> bool:
    """Return whether a folder's run has these settings, but for where it is and how long it goes."""
    try:
        there = values_of(load_config(folder / CONFIG_FILE))
    except ConfigError:
        return False  # none were written, or by a version with other settings
    return all(value == there[name] for name, value in values_of(config).items() if name not in ignored)


def _is_finished(folder: Path) -> bool:
    for path in reversed(committed_checkpoints(folder)):
        try:
            return read_document(path).is_of_finished_run
        except CheckpointError:
            continue  # damaged: the start passes it over and says so
    return False


def make_run_folder(run: Path) -> None:
    """Make the run's folder, unless it is there; a CheckpointError if it cannot be written."""
    try:
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise run_not_writable(run, error) from None


def check_run_folder(run: Path) -> None:
    """Raise the CheckpointError of `make_run_folder` where that is sure to fail, and make nothing."""
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
        weights_only: whether a run takes nothing but the weights from it, and begins at step 0.
        damaged: newer ones that are damaged, and how, a line each.
        goes_back: whether the run goes back to it by request.
        newer: the run's own after it, which are set aside then.
        remarks: what a flag asks for that is not done, a line each.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    weights_only: bool = False
    damaged: tuple[str, ...] = ()
    goes_back: bool = False
    newer: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Updates done where a run begins that starts from here."""
        return 0 if self.weights_only else self.manifest.step

    @property
    def config(self) -> TrainConfig:
        """The settings that it was made with; the defaults where it holds none that this version reads."""
        try:
            return settings_in(self.manifest.config, "config of the checkpoint")
        except ConfigError:
            return TrainConfig()


def find_start(config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({})) -> CheckpointRef | None:
    """Find the checkpoint to start from; None for a new run. A collective call, or one of a process alone.

    Its files are there and have their sizes; what is in them is not read.

    Args:
        damaged: checkpoints that are known not to be good, and what is wrong with them.

    Raises:
        CheckpointError: a named path holds no checkpoint, all are damaged, or `init_from` asks for another start.
    """
    return _on_rank_zero(lambda: _find_start(config, damaged))


def _find_start(config: CheckpointConfig, damaged: Mapping[Path, str]) -> CheckpointRef | None:
    if config.ckpt_save_path is None:
        return None
    run, own = config.folder, committed_checkpoints(config.folder)
    start = _own_start(config, own[::-1], damaged) if own else _start_elsewhere(config, damaged)
    if config.init_from == "resume" and start is None:
        raise CheckpointError(
            f"--init_from=resume goes on with a run, and {run} holds no checkpoint: --init_from=auto begins one, "
            "--ckpt_load_path names one of elsewhere"
        )
    if config.init_from == "scratch" and start is not None and start.config.checkpoint.init_from != "scratch":
        raise CheckpointError(
            f"--init_from=scratch begins from initial weights, and {run} holds a run at step {start.step}: give "
            "another --ckpt_save_path, or --init_from=auto to go on with it"
        )
    return start


def _own_start(config: CheckpointConfig, own: list[Path], damaged: Mapping[Path, str]) -> CheckpointRef:
    """Find the newest good checkpoint of a run, or the older one that the run goes back to."""
    run, request, load_path = config.folder, config.resume_from_checkpoint, config.ckpt_load_path
    newest = _newest_good(own, damaged, SAVE_PATH, run)
    if request is None:
        named = None if load_path is None else _named_in(own, load_path)
        if named is None or named == newest.path:
            return newest
        remark = f"not from --ckpt_load_path={load_path}: --resume_from_checkpoint={load_path} goes back to that one"
        return replace(newest, remarks=(remark,))
    named, before = _named_in(own, request), newest.config.checkpoint.resume_from_checkpoint
    if before is not None and (before == request or (named is not None and _named_in(own, before) == named)):
        remark = f"after --resume_from_checkpoint={request}: done before. A start without the flag makes it work again"
        return replace(newest, remarks=(remark,))
    if named is not None:
        chosen = _newest_good([named], damaged, RESUME, named)
        newer = tuple(path for path in reversed(own) if step_of(path) > step_of(named))
        return replace(chosen, damaged=newest.damaged, goes_back=True, newer=newer)
    if exists(run / ROLLBACK_FILE):  # the run has gone back by itself, to before the one that is named
        return newest
    if exists(Path(request)) and not is_within(Path(request), run):
        return replace(newest, remarks=(f"not from --resume_from_checkpoint={request}, which is not of this run",))
    raise CheckpointError(
        f"--resume_from_checkpoint={request} is no checkpoint of the run in {run}, which holds "
        f"{', '.join(path.name for path in own[::-1])}"
    )


def _named_in(own: list[Path], request: str) -> Path | None:
    """Return the checkpoint among a run's own that was named by its path, its name or its step."""
    named = {path.name: path for path in own}
    by_step = {str(step_of(path)): path for path in own}
    by_path = {real_path(path): path for path in own}
    return named.get(request) or by_step.get(request) or by_path.get(real_path(Path(request)))


def _start_elsewhere(config: CheckpointConfig, damaged: Mapping[Path, str]) -> CheckpointRef | None:
    """Find what a run without checkpoints begins from; None = initial weights."""
    load_path, request = config.ckpt_load_path, config.resume_from_checkpoint
    if load_path is None:
        source, flag = request, RESUME
    elif is_within(Path(load_path), config.folder) and not _checkpoints_at(Path(load_path)):
        return None  # a script may name one folder as both paths, for its first start and for all later ones
    else:
        source, flag = str(from_hub(load_path, MODEL_FILES, CheckpointError)), LOAD_PATH
    if source is None:
        return None
    found = find_newest(Path(source), damaged, flag)
    return replace(found, is_own=False, weights_only=found.weights_only or config.weights_only)


def find_newest(
    source: Path, damaged: Mapping[Path, str] = MappingProxyType({}), flag: str = LOAD_PATH
) -> CheckpointRef:
    """Find the checkpoint at a path, or the newest good one of the run there; in one process.

    Raises:
        CheckpointError: there is none, or all are damaged.
    """
    paths = _checkpoints_at(source)
    if not paths:
        raise CheckpointError(
            f"{flag}={source} holds no complete checkpoint: it is neither one (a folder with {MANIFEST}) nor a "
            f"run with some in {CHECKPOINTS}/."
        )
    return _newest_good(paths, damaged, flag, source)


def _checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at a path, or those of the run there, newest first."""
    if is_checkpoint(source) or is_hugging_face_folder(source):
        return [source]
    return committed_checkpoints(run_of(source))[::-1]


def _newest_good(paths: list[Path], damaged: Mapping[Path, str], flag: str, source: Path) -> CheckpointRef:
    faults: list[str] = []
    for path in paths:
        try:
            if path in damaged:
                raise CheckpointError(damaged[path])
            manifest = manifest_at(path)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return CheckpointRef(path, manifest, weights_only=not manifest.data, damaged=tuple(faults))
    if paths == [source]:  # the user named this one, so that no other will do
        raise CheckpointError(f"{faults[0]}. Name another checkpoint with {flag}.")
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(
        f"{flag}={source} holds {len(faults)} checkpoints, and none is good:\n{lines}\n"
        "Repair one, or give another --ckpt_save_path to start a new run."
    )


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or below it, links followed."""
    real = real_path(path)
    return real_path(folder) in (real, *real.parents)


def manifest_at(path: Path) -> Manifest:
    """Read what a checkpoint is: from its manifest, from its four .pt files, or from a Hugging Face folder.

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
    """Return `find_newest` of a path, where a Hugging Face folder is an error, too."""
    source = Path(path)
    if is_hugging_face_folder(source) and not is_file(source / MANIFEST):
        raise CheckpointError("a Hugging Face folder, not a checkpoint: `pretrain import` makes one of it", path=source)
    return find_newest(source)


# With which settings


def resolve_run(config: AnyTrainConfig) -> tuple[AnyTrainConfig, CheckpointRef | None]:
    """Return settings that leave nothing open, and what a run with them starts from; writes nothing.

    A collective call, or one of a process alone. A {timestamp} that has made no folder yet stays.

    Raises:
        CheckpointError: as `find_start`, or it is of a model with other dimensions.
        ConfigError, DataError: as `adopt_settings`.
    """
    pattern = config.checkpoint.ckpt_save_path
    if pattern is not None and TIMESTAMP in pattern:
        # A folder's settings leave nothing open: compare them with what a new run would adopt.
        new = adopt_settings(config, find_start(replace(config.checkpoint, init_from="auto")))
        ignored = frozenset({"sep_token"} if config.data.sep_token is None else ())
        path = _on_rank_zero(lambda: existing_run_path(pattern, new, ignored))
        config = replace(config, checkpoint=replace(config.checkpoint, ckpt_save_path=path or pattern))
    start = find_start(config.checkpoint)
    config = adopt_settings(config, start)
    if start is not None:
        check_same_model(start.manifest, resolve_shape(config.model), start.path)
    return config, start


def adopt_settings(config: AnyTrainConfig, start: CheckpointRef | None) -> AnyTrainConfig:
    """Fill in what settings leave open: the model, its vocabulary, and the separator of documents.

    A model without a variant has the dimensions of what the run starts from; dimensions that were given stay, and the
    start refuses them if they differ. A vocabulary is that of the start, or big enough for the tokenizer. A separator
    is that of the run that is resumed or, in a new run, of the prepared data. A collective call, or one of a process
    alone.

    Raises:
        ConfigError: the settings do not fit the model, or datasets name different separators.
        DataError: the tokenizer or a prepare.json cannot be read.
    """
    adopted = replace(config, model=_adopt_model(config, start), data=_adopt_separator(config, start))
    check_config(adopted)
    return adopted


def _adopt_model(config: TrainConfig, start: CheckpointRef | None) -> ModelConfig:
    needs_vocabulary = config.model.vocab_size is None and config.data.tokenizer_path is not None
    if config.model.model_variant is not None and not needs_vocabulary:
        return config.model
    shape = None if start is None else shape_of(start.manifest)
    model = config.model
    if model.model_variant is None:
        model = ModelConfig(model_variant=DEFAULT_VARIANT) if shape is None else model_settings(shape)
    if needs_vocabulary:
        rows = _vocabulary_for(config.data.tokenizer_path or "") if shape is None else shape.vocab_size
        model = replace(model, vocab_size=rows)
    given = {name: value for name, value in vars(config.model).items() if value not in (None, ())}
    return replace(model, **given)


def _adopt_separator(config: TrainConfig, start: CheckpointRef | None) -> DataConfig:
    from pretraining.data.storage.dataset_files import prepared_separator  # imports NumPy

    data = config.data
    if data.sep_token is not None or data.use_dummy_dataset:
        return data
    if start is not None and not start.weights_only:
        return replace(data, sep_token=start.manifest.data.get("sep_token"))
    return replace(data, sep_token=_on_rank_zero(lambda: prepared_separator(data, config.evaluation.eval_datasets)))


def _vocabulary_for(tokenizer_path: str) -> int:
    """Return the size of an embedding for a tokenizer: of a multiple of 128 rows, matrix products are faster."""
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
    """Read tensors of a checkpoint of any form into place; a collective call that raises as `load_tensors`."""
    from pretraining.checkpoint.reader import load_tensors

    manifest = checkpoint.manifest if _is_of_ours(checkpoint.path) else None
    load_tensors(checkpoint.path, files_of(checkpoint), tensors, manifest)


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> tuple[CheckpointRef, Llama]:
    """Load a model into one process: of a checkpoint, of a run's newest sound one, or of a Hugging Face folder.

    Returns:
        Where it comes from, and the model in evaluation mode.

    Raises:
        CheckpointError: there is no checkpoint, all are damaged, or it is of no Llama.
    """
    import torch

    from pretraining.model.llama import Llama

    damaged: dict[Path, str] = {}
    while True:
        found = find_newest(Path(path), damaged)
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
    """Return the tensors of a checkpoint, compared with its checksums before use; raises as `TensorFiles`."""
    from pretraining.checkpoint.reader import TensorFiles

    return TensorFiles(checkpoint.path, files_of(checkpoint))


def files_of(checkpoint: CheckpointRef) -> Files:
    """Return the files that hold a checkpoint's tensors, with sizes and checksums where it has a manifest."""
    path = checkpoint.path
    if checkpoint.manifest.files or is_file(path / MANIFEST):
        return checkpoint.manifest.files
    if is_file(path / ITERATION_FILE):
        return dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE))
    from pretraining.checkpoint.hf_import import weight_files

    return dict.fromkeys(_on_rank_zero(lambda: weight_files(path)))
