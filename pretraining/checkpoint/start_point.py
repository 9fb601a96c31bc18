"""Start point of a run: the checkpoint that it resumes or starts from.

    ckpt_save_path, ckpt_load_path   -> `find_start`: the newest good checkpoint, or None
    checkpoint                       -> `load`: its tensors, in place; if they are damaged, find the next checkpoint

A run resumes from the newest good checkpoint of its folder, so a job that is submitted again continues. In an empty
folder, a run starts from `ckpt_load_path`: a sharded or full checkpoint, four .pt files without a manifest
(`pt_files`), or a Hugging Face folder (`hf_import`). From the last, or with weights_only, it loads only weights and
starts at step 0.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from pretraining.checkpoint.manifest import (
    ITERATION_FILE,
    MANIFEST,
    MODEL_FILE,
    OPTIMIZER_FILE,
    Manifest,
    read_manifest,
    shape_of,
    tensor_state,
)
from pretraining.checkpoint.run_folder import CHECKPOINTS, Checkpoint, committed_checkpoints, is_committed, run_of
from pretraining.config.recipes import settings_in
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.errors import CheckpointError, ConfigError, DamagedError
from pretraining.files import exists, from_hub, is_address, is_file, is_folder, real_path
from pretraining.model.hf import CONFIG_FILE as HUGGING_FACE_FILE
from pretraining.model.hf import MODEL_FILES

if TYPE_CHECKING:  # finding a checkpoint needs no torch, whose import takes a second; loading one does
    import torch

    from pretraining.checkpoint.reader import Files
    from pretraining.model.llama import Llama

T = TypeVar("T")

FETCHED = "fetched"
"""Subfolder of a run for a start point that was fetched from an object store."""
SAVE_PATH, LOAD_PATH, RESUME = "--ckpt_save_path", "--ckpt_load_path", "--resume_from_checkpoint"


@dataclass(frozen=True)
class CheckpointRef:
    """Checkpoint that a run can start from.

    Attributes:
        manifest: made from the model config if the checkpoint is a Hugging Face folder.
        is_own: whether this run saved the checkpoint, and not another run.
        weights_only: whether the run takes only the weights, and starts at step 0.
        damaged: newer damaged checkpoints, one line each with the fault.
        is_rewind: whether the user asked to go back to this older checkpoint.
        newer: the run's newer checkpoints, which a rewind sets aside.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    weights_only: bool = False
    damaged: tuple[str, ...] = ()
    is_rewind: bool = False
    newer: tuple[Path, ...] = ()

    @property
    def step(self) -> int:
        """Step at which a run from this start point begins."""
        return 0 if self.weights_only else self.manifest.step

    @property
    def config(self) -> TrainConfig:
        """Settings of the run that saved the checkpoint; the defaults if this version cannot read them."""
        try:
            return settings_in(self.manifest.config, "config of the checkpoint")
        except ConfigError:
            return TrainConfig()

    @property
    def files(self) -> Files:
        """Files that hold the tensors, with sizes and checksums if there is a manifest."""
        if self.manifest.files or is_file(self.path / MANIFEST):
            return self.manifest.files
        if is_file(self.path / ITERATION_FILE):
            return dict.fromkeys((MODEL_FILE, OPTIMIZER_FILE))
        from pretraining.checkpoint.hf_import import weight_files

        return dict.fromkeys(weight_files(self.path))


def find_start(
    config: CheckpointConfig, damaged: Mapping[Path, str] = MappingProxyType({}), before_step: int | None = None
) -> CheckpointRef | None:
    """Find the checkpoint to start from; None for a new run. A collective call if torch is imported.

    All its files exist with the right sizes; their content is not read yet.

    Args:
        damaged: checkpoints that are known to be damaged, with their faults.
        before_step: for a rollback: only checkpoints before this step count; None = no rollback.

    Raises:
        CheckpointError: a named path holds no checkpoint, all are damaged, or `init_from` refuses the start.
    """
    return on_rank_zero(lambda: _find_start(config, damaged, before_step))


def _find_start(config: CheckpointConfig, damaged: Mapping[Path, str], before_step: int | None) -> CheckpointRef | None:
    if config.ckpt_save_path is None:
        return None
    run = config.folder
    own = [each for each in committed_checkpoints(run)[::-1] if before_step is None or each.step < before_step]
    if not own:
        start = _start_of_new_run(config, damaged)
    elif before_step is None:
        start = _own_start(config, own, damaged)
    else:
        start = _newest_good([each.path for each in own], damaged, SAVE_PATH, run)
    if config.init_from == "resume" and start is None:
        raise CheckpointError(
            f"--init_from=resume needs a checkpoint, and {run} holds none: give --init_from=auto, or --ckpt_load_path"
        )
    if config.init_from == "scratch" and start is not None and start.config.checkpoint.init_from != "scratch":
        raise CheckpointError(
            f"--init_from=scratch: {run} holds a run at step {start.step}. Give another --ckpt_save_path, or "
            "--init_from=auto to resume it"
        )
    return start


def _own_start(config: CheckpointConfig, own: list[Checkpoint], damaged: Mapping[Path, str]) -> CheckpointRef:
    """Find the newest good checkpoint of a run, or the older one that the user asks to go back to."""
    run, request = config.folder, config.resume_from_checkpoint
    newest = _newest_good([each.path for each in own], damaged, SAVE_PATH, run)
    if request is None:
        return newest
    named, earlier = _find_named(own, request), newest.config.checkpoint.resume_from_checkpoint
    if earlier is not None and (earlier == request or (named is not None and _find_named(own, earlier) == named)):
        return newest  # an earlier start has gone back already
    if named is not None:
        chosen = _newest_good([named.path], damaged, RESUME, named.path)
        newer = tuple(each.path for each in reversed(own) if each.step > named.step)
        return replace(chosen, damaged=newest.damaged, is_rewind=True, newer=newer)
    if exists(Path(request)) and not is_within(Path(request), run):
        return newest  # the run started from this path
    raise CheckpointError(
        f"--resume_from_checkpoint={request} is no checkpoint of the run in {run}, which holds "
        f"{', '.join(each.path.name for each in own[::-1])}"
    )


def _find_named(own: list[Checkpoint], request: str) -> Checkpoint | None:
    """Return the checkpoint with this name, step or path, of a run's own checkpoints, newest first."""
    by_name = {each.path.name: each for each in own}
    by_step = {str(each.step): each for each in own}
    by_path = {real_path(each.path): each for each in own}
    return by_name.get(request) or by_step.get(request) or by_path.get(real_path(Path(request)))


def _start_of_new_run(config: CheckpointConfig, damaged: Mapping[Path, str]) -> CheckpointRef | None:
    """Find the start point of a run without checkpoints; None = initial weights."""
    load_path, request = config.ckpt_load_path, config.resume_from_checkpoint
    if load_path is None:
        source, flag = request, RESUME
    elif is_address(load_path):
        source, flag = str(fetched_path(config)), LOAD_PATH
    elif is_within(Path(load_path), config.folder) and _are_own(checkpoints_at(Path(load_path)), config.folder):
        return None  # a script may give one folder as both paths, for its first start and all later ones
    else:
        source, flag = str(from_hub(load_path, MODEL_FILES, CheckpointError)), LOAD_PATH
    if source is None:
        return None
    found = find_newest(Path(source), damaged, flag)
    return replace(found, is_own=False, weights_only=found.weights_only or config.weights_only)


def _are_own(paths: list[Path], run: Path) -> bool:
    """Return whether the run has saved all these checkpoints; then it did not start from them."""
    own = {real_path(each.path) for each in committed_checkpoints(run)}
    return all(real_path(path) in own for path in paths)


def fetched_path(config: CheckpointConfig) -> Path:
    """Return the folder for checkpoints fetched from the address `ckpt_load_path`; its layout is that of a run."""
    name = re.sub(r"[^\w.-]+", "_", (config.ckpt_load_path or "").partition("?")[0])
    return config.folder / FETCHED / name


def find_newest(
    source: Path, damaged: Mapping[Path, str] = MappingProxyType({}), flag: str = LOAD_PATH
) -> CheckpointRef:
    """Find the checkpoint at a path, or the newest good one of the run there; in one process.

    Raises:
        CheckpointError: there is none, or all are damaged.
    """
    paths = checkpoints_at(source)
    if not paths:
        from pretraining.checkpoint.hf_import import describe_other_weights

        raise CheckpointError(
            f"{flag}={source} holds no complete checkpoint: no {MANIFEST}, and none in a folder {CHECKPOINTS}/"
            f"{describe_other_weights(source)}"
        )
    return _newest_good(paths, damaged, flag, source)


def checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at a path, possibly damaged, or the checkpoints of the run there, newest first."""
    forms = (MANIFEST, ITERATION_FILE, HUGGING_FACE_FILE)
    if is_folder(source) and (is_committed(source) or any(is_file(source / name) for name in forms)):
        return [source]
    return [each.path for each in reversed(committed_checkpoints(run_of(source)))]


def _newest_good(paths: list[Path], damaged: Mapping[Path, str], flag: str, source: Path) -> CheckpointRef:
    faults: list[str] = []
    for path in paths:
        try:
            if path in damaged:
                raise CheckpointError(damaged[path])
            manifest = read_manifest(path)
        except CheckpointError as error:
            faults.append(str(error))
        else:
            return CheckpointRef(path, manifest, weights_only=not manifest.data, damaged=tuple(faults))
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(f"{flag}={source} holds no good checkpoint:\n{lines}\nRepair one, or give another {flag}")


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or below it, with links resolved."""
    real = real_path(path)
    return real_path(folder) in (real, *real.parents)


def on_rank_zero(function: Callable[[], T]) -> T:
    """Call `processes.on_rank_zero`; without torch imported there is one process, which just calls the function."""
    if "torch" not in sys.modules:
        return function()
    from pretraining.distributed.processes import on_rank_zero

    return on_rank_zero(function)


# Tensors of a checkpoint


def load(checkpoint: CheckpointRef, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors in place from a checkpoint of any form; a collective call that raises as `load_tensors`."""
    from pretraining.checkpoint.reader import load_tensors

    files: Files = checkpoint.manifest.files or on_rank_zero(lambda: checkpoint.files)
    load_tensors(checkpoint.path, files, tensors, checkpoint.manifest)


def load_newest(source: Path, tensors: Mapping[str, torch.Tensor]) -> CheckpointRef:
    """Load tensors in place from the newest good checkpoint at a path, and return the checkpoint; a collective call."""
    damaged: dict[Path, str] = {}
    while True:
        found = on_rank_zero(lambda: find_newest(source, damaged))
        try:
            load(found, tensors)
        except DamagedError as error:
            damaged[found.path] = str(error)
        else:
            return found


def load_model(path: str, device: torch.device, dtype: torch.dtype) -> tuple[CheckpointRef, Llama]:
    """Load a model into one process, from a checkpoint, a run's newest good one, or a Hugging Face folder.

    Returns:
        The checkpoint, and the model in evaluation mode.

    Raises:
        CheckpointError: there is no checkpoint, all are damaged, or the model is no Llama.
    """
    import torch

    from pretraining.model.llama import Llama

    with torch.device("meta"):
        model = Llama(shape_of(find_newest(Path(path)).manifest))
    model.to_empty(device="cpu")
    model.tie_weights()
    found = load_newest(Path(path), tensor_state(dict(model.named_parameters()), None))
    return found, model.to(device=device, dtype=dtype).eval()
