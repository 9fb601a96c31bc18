"""Start point of a run: the checkpoint that it resumes or starts from.

    ckpt_save_path, ckpt_load_path   -> `find_start`: the newest good checkpoint, or None
    checkpoint                       -> `restore.load`: its tensors; if they are damaged, find the next checkpoint

A run resumes from the newest good checkpoint of its folder and its mirror (`own_checkpoints`), so a job that is
submitted again continues. In an empty folder, a run starts from `ckpt_load_path`: a sharded or full checkpoint, four
.pt files without a manifest (`pt_files`), or a Hugging Face folder (`hf_import`). From the last, or with weights_only,
it loads only weights and starts at step 0. A checkpoint that only an object store holds is fetched later, when nothing
refuses the start any more (`mirror.fetch_start`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from pretraining.checkpoint.forms import form_of, read_if_good, read_manifest
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.own_checkpoints import NO_COPIES, Copies, OwnCheckpoints, own_checkpoints
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    SET_ASIDE,
    SET_ASIDE_FILE,
    Checkpoint,
    Copy,
    checkpoint_at,
    checkpoints_set_aside,
    committed_checkpoints,
    is_committed,
    last_settings,
    run_of,
)
from pretraining.config.recipes import settings_in
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import from_hub, is_address, is_folder, real_path
from pretraining.model.hf import MODEL_FILES
from pretraining.text import count_of

log = logging.getLogger(__name__)

FETCHED = "fetched"
"""Subfolder of a run for a start point that was fetched from an object store."""
_EARLIER = "was for an earlier start of this run, which resumes. For a new run give another --ckpt_save_path"
SAVE_PATH, LOAD_PATH, RESUME = "--ckpt_save_path", "--ckpt_load_path", "--resume_from_checkpoint"


@dataclass(frozen=True)
class CheckpointRef:
    """Checkpoint that a run can start from.

    Attributes:
        manifest: made from the model config if the checkpoint is a Hugging Face folder.
        is_own: whether this run saved the checkpoint, and not another run.
        weights_only: whether the run takes only the weights, and starts at step 0.
        damaged: newer damaged checkpoints, one line each with the fault.
        is_rewind: whether the user asked to go back to this older checkpoint, which sets newer ones aside.
        copy: copy to fetch before the checkpoint can be loaded; None = the checkpoint is at `path`.
        best_copy: copy of the run's best checkpoint, if its folder lacks that one.
        unmet: lines about the requests of the user that a run which resumes does not follow.
        run: what the run has given up elsewhere, and what its mirror held when the start was chosen.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    weights_only: bool = False
    damaged: tuple[str, ...] = ()
    is_rewind: bool = False
    copy: Copy | None = None
    best_copy: Copy | None = None
    unmet: tuple[str, ...] = ()
    run: OwnCheckpoints = field(default_factory=OwnCheckpoints)

    @property
    def source(self) -> str:
        """Path of the checkpoint or, if it must be fetched, its address."""
        return str(self.path if self.copy is None else self.copy)

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


def find_start(
    config: CheckpointConfig,
    damaged: Mapping[str, str] = MappingProxyType({}),
    before_step: int | None = None,
    copies: Copies = NO_COPIES,
) -> CheckpointRef | None:
    """Find the checkpoint to start from; None for a new run. Call it in one process of a job.

    All its files exist with the right sizes; their content is not read yet.

    Args:
        damaged: faults of checkpoints that are known to be damaged, by `CheckpointRef.source`.
        before_step: for a rollback: only checkpoints before this step count; None = no rollback.
        copies: checkpoints in the run's mirror.

    Raises:
        CheckpointError: a named path holds no checkpoint, all are damaged, or `init_from` refuses the start.
    """
    if config.ckpt_save_path is None:
        return None
    run, listed = config.folder, own_checkpoints(config.folder, copies)
    own = [each for each in reversed(listed.current) if before_step is None or each.step < before_step]
    if not own and copies.incomplete and before_step is None:
        raise CheckpointError(
            f"--ckpt_mirror_path holds {count_of(copies.incomplete, 'checkpoint')}, but no complete one, and {run} "
            "holds none: give another --ckpt_mirror_path"
        )
    if not own:
        start = _start_of_new_run(config, damaged)
    elif before_step is None:
        start = _own_start(config, own, damaged)
    else:
        start = _newest_good(own, damaged, SAVE_PATH, run)
    if config.init_from == "resume" and start is None:
        raise CheckpointError(
            f"--init_from=resume needs a checkpoint, and {run} holds none: give --init_from=auto, or --ckpt_load_path"
        )
    if config.init_from == "scratch" and start is not None and start.config.checkpoint.init_from != "scratch":
        raise CheckpointError(
            f"--init_from=scratch: {run} holds a run at step {start.step}. Give another --ckpt_save_path, or "
            "--init_from=auto to resume it"
        )
    if start is None or not own:
        return start
    return replace(start, run=replace(listed, current=()), best_copy=_missing_best(listed.current, start))


def _missing_best(own: Sequence[Checkpoint], start: CheckpointRef) -> Copy | None:
    """Return the copy of the best checkpoint up to the start point, if the run's folder lacks that checkpoint."""
    if all(each.is_here for each in own):
        return None
    from pretraining.checkpoint.retention import best_of  # imports torch

    saved = [each for each in own if each.has_save_name and each.step <= start.step]
    best = best_of(saved)
    missing = [each.copy for each in saved if each == best and not each.is_here and each.copy != start.copy]
    return missing[0] if missing else None


def _own_start(config: CheckpointConfig, own: list[Checkpoint], damaged: Mapping[str, str]) -> CheckpointRef:
    """Find the newest good checkpoint of a run, or the older one that the user asks to go back to.

    An accepted start records the request, in config.yaml and in later checkpoints, so that no later start repeats it.
    """
    run, load_path, request = config.folder, config.ckpt_load_path, config.resume_from_checkpoint
    unmet = [f"init_from=scratch {_EARLIER}"] if config.init_from == "scratch" else []
    if load_path is not None and (is_address(load_path) or not is_within(Path(load_path), run)):
        unmet.append(f"ckpt_load_path={load_path} {_EARLIER}")
    newest = _newest_good(own, damaged, SAVE_PATH, run)
    if newest.manifest.average:
        raise CheckpointError(
            f"is an average of checkpoints: start a new run from it, with {LOAD_PATH}={run} and another {SAVE_PATH}",
            path=run,
        )
    if request is None:
        return replace(newest, unmet=tuple(unmet))
    named, last = _find_named(own, request), last_settings(run)
    done = [each.checkpoint.resume_from_checkpoint or "" for each in (newest.config, last) if each is not None]
    is_done = request in done or (named is not None and named in [_find_named(own, each) for each in done if each])
    if named is not None and (not is_done or named.path == newest.path):
        chosen = _newest_good([named], damaged, RESUME, named.path)
        return replace(chosen, damaged=newest.damaged, is_rewind=True)
    unmet.append(f"resume_from_checkpoint={request} {_EARLIER}")
    if named is not None:
        folder = run / CHECKPOINTS / f"{SET_ASIDE}<name>"
        unmet[-1] += f". To go back again, first move newer checkpoints to a new folder {folder}"
    elif not is_done:
        _check_begun_there(config, own, newest)
    return replace(newest, unmet=tuple(unmet))


def _check_begun_there(config: CheckpointConfig, own: list[Checkpoint], newest: CheckpointRef) -> None:
    """Raise a CheckpointError unless a run began at the checkpoint that a request names and the run does not have."""
    run, request = config.folder, config.resume_from_checkpoint or ""
    gone = [checkpoint_at(path) for path in reversed(checkpoints_set_aside(run))]
    if aside := _find_named(gone, request):
        raise CheckpointError(
            f"{RESUME}={request} is set aside. To take it back, move {aside.path} to {run / CHECKPOINTS}. If there is "
            f"one of its name, give another name; else rename its {SET_ASIDE_FILE} in the mirror, if any, to {MANIFEST}"
        )
    if not any(_started_from(each, Path(request)) for each in own):
        raise CheckpointError(
            f"{RESUME}={request} is no checkpoint of the run in {run}, which holds "
            f"{', '.join(each.path.name for each in own[::-1])}, and the run did not start from it. Leave it out to "
            f"resume from step {newest.step}, or start a new run in another folder"
        )


def _started_from(own: Checkpoint, path: Path) -> bool:
    """Return whether the run has named a path of another run as its start point when it saved this checkpoint."""
    manifest = read_if_good(own.path) if own.copy is None else own.copy.manifest
    if manifest is None:
        return False
    named = CheckpointRef(own.path, manifest).config.checkpoint
    paths = (named.resume_from_checkpoint, named.ckpt_load_path)
    return real_path(path) in [real_path(Path(each)) for each in paths if each is not None]


def named_checkpoint(run: Path, request: str) -> Path | None:
    """Return the checkpoint in a run's folder that `resume_from_checkpoint` names there; None = no such one."""
    named = _find_named(committed_checkpoints(run)[::-1], request)
    return None if named is None else named.path


def _find_named(own: list[Checkpoint], request: str) -> Checkpoint | None:
    """Return the checkpoint with this name, step or path, of a run's own checkpoints, newest first."""
    by_name = {each.path.name: each for each in own}
    by_step = {str(each.step): each for each in own}
    by_path = {real_path(each.path): each for each in own}
    return by_name.get(request) or by_step.get(request) or by_path.get(real_path(Path(request)))


def _start_of_new_run(config: CheckpointConfig, damaged: Mapping[str, str]) -> CheckpointRef | None:
    """Find the start point of a run without checkpoints; None = initial weights."""
    load_path, request = config.ckpt_load_path, config.resume_from_checkpoint
    if load_path is not None and is_address(load_path):
        found = _find_in_store(load_path, config.folder, damaged)
    elif load_path is None:
        if request is None:
            return None
        found = find_newest(Path(request), damaged, RESUME)
    elif is_within(Path(load_path), config.folder) and _are_own(checkpoints_at(Path(load_path)), config.folder):
        return None  # a script may give one folder as both paths, for its first start and all later ones
    else:
        found = find_newest(from_hub(load_path, MODEL_FILES, CheckpointError), damaged)
    return replace(found, is_own=False, weights_only=found.weights_only or config.weights_only)


def _find_in_store(address: str, run: Path, damaged: Mapping[str, str]) -> CheckpointRef:
    """Find the newest good checkpoint at an address; those that an earlier start has fetched are not fetched again."""
    from pretraining.checkpoint.copies import read_copies  # imports pyarrow

    place = address.partition("?")[0]
    fetched = run / FETCHED / re.sub(r"[^\w.-]+", "_", place)  # with the layout of a run
    found = own_checkpoints(fetched, read_copies(address)).current
    if not found:
        raise CheckpointError(f"{LOAD_PATH}={place} holds no complete checkpoint")
    return _newest_good(found[::-1], damaged, LOAD_PATH, place)


def _are_own(paths: list[Path], run: Path) -> bool:
    """Return whether the run has saved all these checkpoints; then it did not start from them."""
    own = {real_path(each.path) for each in committed_checkpoints(run)}
    return all(real_path(path) in own for path in paths)


def find_newest(
    source: Path, damaged: Mapping[str, str] = MappingProxyType({}), flag: str = LOAD_PATH
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
    return _newest_good([checkpoint_at(path) for path in paths], damaged, flag, source)


def checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at a path, possibly damaged, or the checkpoints of the run there, newest first."""
    if is_folder(source) and (is_committed(source) or form_of(source) is not None):
        return [source]
    return [each.path for each in reversed(committed_checkpoints(run_of(source)))]


def _newest_good(
    checkpoints: Sequence[Checkpoint], damaged: Mapping[str, str], flag: str, source: Path | str
) -> CheckpointRef:
    """Return the first checkpoint without a known fault; a damaged one in the folder is replaced by its copy."""
    faults: list[str] = []
    for each in checkpoints:
        for place in each.places:
            try:
                if str(place) in damaged:
                    raise CheckpointError(damaged[str(place)])
                copy, manifest = (place, place.manifest) if isinstance(place, Copy) else (None, read_manifest(place))
            except CheckpointError as error:
                faults.append(str(error))
            else:
                is_empty = not manifest.data
                return CheckpointRef(each.path, manifest, weights_only=is_empty, damaged=tuple(faults), copy=copy)
    lines = "\n".join(f"  {line}" for line in faults)
    raise CheckpointError(f"{flag}={source} holds no good checkpoint:\n{lines}\nRepair one, or give another {flag}")


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or below it, with links resolved."""
    real = real_path(path)
    return real_path(folder) in (real, *real.parents)
