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

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from pretraining.checkpoint.branches import identity_of, newest, own
from pretraining.checkpoint.manifest import MANIFEST, Manifest
from pretraining.checkpoint.own_checkpoints import (
    NO_COPIES,
    Copies,
    RunCheckpoints,
    best_of,
    list_run,
    saved_by_run,
)
from pretraining.checkpoint.run_folder import (
    BEST,
    CHECKPOINTS,
    Checkpoint,
    Copy,
    checkpoint_at,
    checkpoints_of_run,
    committed_checkpoints,
    form_of,
    free_path,
    is_committed,
    read_manifest,
    run_of,
)
from pretraining.config.recipe_files import settings_in
from pretraining.config.training import CheckpointConfig, TrainConfig
from pretraining.errors import CheckpointError, ConfigError
from pretraining.files import exists, from_hub, is_address, is_folder, parse_address, real_path
from pretraining.model.hf import MODEL_FILES
from pretraining.text import count_of, list_some

FETCHED = "fetched"
"""Subfolder of a run for a start point that was fetched from an object store."""
_EARLIER = "was for an earlier start of this run, which resumes. For a new run give another --ckpt_save_path"
SAVE_PATH, LOAD_PATH, RESUME = "--ckpt_save_path", "--ckpt_load_path", "--resume_from_checkpoint"
_SHOWN = 8


@dataclass(frozen=True)
class CheckpointRef:
    """Checkpoint that a run can start from.

    Attributes:
        manifest: made from the model config if the checkpoint is a Hugging Face folder.
        is_own: whether this run saved the checkpoint, and not another run.
        weights_only: whether the run takes only the weights, and starts at step 0.
        damaged: newer damaged checkpoints, one line each with the fault.
        is_rewind: whether the user asked to go back to this checkpoint, so that the run gives up newer ones.
        copy: copy to fetch before the checkpoint can be loaded; None = the checkpoint is in a folder.
        aside: folder of a checkpoint that was set aside and moves to `path` before it is loaded; None = it is there.
        best_copy: copy of the run's best checkpoint, if its folder lacks that one.
        unmet: lines about the requests of the user that a run which resumes does not follow.
        mirrored: the newest checkpoint in the mirror when the start was chosen: id of its branch, and step.
    """

    path: Path
    manifest: Manifest
    is_own: bool = True
    weights_only: bool = False
    damaged: tuple[str, ...] = ()
    is_rewind: bool = False
    copy: Copy | None = None
    aside: Path | None = None
    best_copy: Copy | None = None
    unmet: tuple[str, ...] = ()
    mirrored: tuple[str, int] | None = None

    @property
    def source(self) -> str:
        """Path of the checkpoint or, if it must be fetched, its address."""
        return str(self.copy or self.aside or self.path)

    @property
    def step(self) -> int:
        """Step at which a run from this start point begins."""
        return 0 if self.weights_only else self.manifest.step

    @property
    def is_returned_to(self) -> bool:
        """Whether a return goes back to this checkpoint, or has done so and nothing was saved since."""
        is_target = any(not last.is_plain and last.begin == self.manifest.step for last in self.manifest.branches[-1:])
        return self.is_rewind or (is_target and self.manifest.request is not None)

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
    run, listed = config.folder, list_run(config.folder, copies)
    if not listed.saved and copies.incomplete and before_step is None:
        raise CheckpointError(
            f"--ckpt_mirror_path holds {count_of(copies.incomplete, 'checkpoint')}, but no complete one, and {run} "
            "holds none: give another --ckpt_mirror_path"
        )
    start = _own_start(config, listed, damaged, before_step) if listed.saved else None
    if start is None:
        start = _start_of_new_run(config, damaged)
    if config.init_from == "resume" and start is None:
        raise CheckpointError(
            f"--init_from=resume needs a checkpoint, and {run} holds none: give --init_from=auto, or --ckpt_load_path"
        )
    if config.init_from == "scratch" and start is not None and start.config.checkpoint.init_from != "scratch":
        raise CheckpointError(
            f"--init_from=scratch: {run} holds a run at step {start.step}. Give another --ckpt_save_path, or "
            "--init_from=auto to resume it"
        )
    if start is None or not start.is_own:
        return start
    mirrored = None if listed.mirrored is None else identity_of(listed.mirrored)
    return replace(start, best_copy=_missing_best(listed, start), mirrored=mirrored)


def _missing_best(listed: RunCheckpoints, start: CheckpointRef) -> Copy | None:
    """Return the copy of the best checkpoint up to the start point, if the run's folder lacks that checkpoint."""
    if all(checkpoint.is_here for checkpoint in listed.saved):
        return None
    best = best_of(saved_by_run(start.manifest, listed.saved))
    return None if best is None or best.is_here or best.copy == start.copy else best.copy


def _own_start(
    config: CheckpointConfig, listed: RunCheckpoints, damaged: Mapping[str, str], before_step: int | None
) -> CheckpointRef | None:
    """Find the newest good checkpoint of a run, or the older one that a request or a rollback goes back to.

    A request is done once the newest checkpoint was saved under it, or has got its manifest from it.

    Returns:
        None: the run has no checkpoint before `before_step`.
    """
    run, load_path, request = config.folder, config.ckpt_load_path, config.resume_from_checkpoint
    head = _checked(*newest_good(listed.saved, damaged), SAVE_PATH, run)
    if head.manifest.average:
        raise CheckpointError(
            f"is an average of checkpoints: start a new run from it, with {LOAD_PATH}={run} and another {SAVE_PATH}",
            path=run,
        )
    of_run = own(head.manifest, listed.saved)
    if before_step is not None:
        earlier = [checkpoint for checkpoint in of_run if checkpoint.step < before_step]
        return _checked(*newest_good(earlier, damaged), SAVE_PATH, run) if earlier else None
    unreadable = [checkpoint for checkpoint in listed.saved if checkpoint.kind is None]
    named = None if request is None else _find_named([*unreadable, *of_run, *listed.set_aside], request)
    before = head.manifest.request
    if request is None or request == before or (named and before and named == _find_named(of_run, before)):
        unmet = [f"init_from=scratch {_EARLIER}"] if config.init_from == "scratch" else []
        if load_path is not None and (is_address(load_path) or not is_within(Path(load_path), run)):
            unmet.append(f"ckpt_load_path={load_path} {_EARLIER}")
        return replace(head, unmet=tuple(unmet))
    if named is None:
        raise CheckpointError(_describe_unknown(listed, of_run, request, head.step))
    chosen = _checked(*newest_good([named], damaged), RESUME, named.path)
    if named in listed.set_aside:
        path = free_path(run, named)
        chosen = replace(chosen, path=path, aside=named.path if chosen.copy is None else None)
    return replace(chosen, damaged=head.damaged, is_rewind=True)


def _describe_unknown(listed: RunCheckpoints, of_run: Sequence[Checkpoint], request: str, step: int) -> str:
    """Return the error about a request that names no checkpoint of the run."""
    aside = [
        checkpoint.path for checkpoint in listed.set_aside if request in (checkpoint.path.name, str(checkpoint.step))
    ]
    if aside:
        return f"{RESUME}={request} is set aside. To go back to it, give its path: {RESUME}={aside[-1]}"
    names = list_some([checkpoint.path.name for checkpoint in of_run], _SHOWN)
    return (
        f"{RESUME}={request} is no checkpoint of the run in {listed.run}, which holds {names}. Leave it out to resume "
        f"from step {step}, or start a new run in another folder"
    )


def named_checkpoint(run: Path, request: str) -> Path | None:
    """Return the checkpoint in a run's folder that `resume_from_checkpoint` names there; None = no such one."""
    listed = list_run(run)
    head, _ = newest_good(listed.saved)
    of_run = [] if head is None else own(head.manifest, listed.saved)
    named = _find_named([*of_run, *listed.set_aside], request)
    return None if named is None else named.path


def _find_named(checkpoints: Sequence[Checkpoint], request: str) -> Checkpoint | None:
    """Return the checkpoint with this name, step or path; one that is set aside has only its path."""
    in_run = [checkpoint for checkpoint in checkpoints if checkpoint.path.parent.name == CHECKPOINTS]
    by_name = {checkpoint.path.name: checkpoint for checkpoint in in_run}
    by_step = {str(checkpoint.step): checkpoint for checkpoint in in_run}
    by_path = {real_path(checkpoint.path): checkpoint for checkpoint in checkpoints}
    return by_name.get(request) or by_step.get(request) or by_path.get(real_path(Path(request)))


def _start_of_new_run(config: CheckpointConfig, damaged: Mapping[str, str]) -> CheckpointRef | None:
    """Find the start point of a run without checkpoints; None = initial weights."""
    load_path, request = config.ckpt_load_path, config.resume_from_checkpoint
    if load_path is not None and is_address(load_path):
        start = _find_in_store(load_path, config.folder, damaged)
    elif load_path is None:
        if request is None:
            return None
        start = find_newest(Path(request), damaged, RESUME)
    elif is_within(Path(load_path), config.folder) and _are_own(checkpoints_at(Path(load_path)), config.folder):
        return None  # a script may give one folder as both paths, for its first start and all later ones
    else:
        start = find_newest(from_hub(load_path, MODEL_FILES, CheckpointError), damaged)
    return replace(start, is_own=False, weights_only=start.weights_only or config.weights_only)


def _find_in_store(address: str, run: Path, damaged: Mapping[str, str]) -> CheckpointRef:
    """Find the newest good checkpoint at an address; those that an earlier start has fetched are not fetched again."""
    from pretraining.checkpoint.copies import read_copies  # imports pyarrow

    place, checksum = parse_address(address).place, zlib.crc32(address.encode("utf-8", "surrogateescape"))
    name = re.sub(r"[^\w.-]+", "_", place)  # other addresses may have it, too
    fetched = run / FETCHED / f"{name}-{checksum:08x}"  # with the layout of a run
    listed = list_run(fetched, read_copies(address))
    if not listed.saved:
        raise CheckpointError(f"{LOAD_PATH}={place} holds no complete checkpoint")
    return _checked(*newest_good(listed.saved, damaged), LOAD_PATH, place)


def _are_own(paths: list[Path], run: Path) -> bool:
    """Return whether the run has saved all these checkpoints; then it did not start from them."""
    saved = {real_path(checkpoint.path) for checkpoint in committed_checkpoints(run)}
    return all(real_path(path) in saved for path in paths)


def find_newest(
    source: Path, damaged: Mapping[str, str] = MappingProxyType({}), flag: str = LOAD_PATH
) -> CheckpointRef:
    """Find the checkpoint at a path, or the newest good one of the run there; in one process.

    Raises:
        CheckpointError: there is none, or all are damaged.
    """
    paths = checkpoints_at(_best_of_copied_run(source))
    if not paths:
        from pretraining.checkpoint.hf_import import describe_other_weights

        if not exists(source):
            raise CheckpointError(f"{flag}={source}: there is no such folder")
        raise CheckpointError(
            f"{flag}={source} holds no complete checkpoint: no {MANIFEST}, and none in a folder {CHECKPOINTS}/"
            f"{describe_other_weights(source)}"
        )
    return _checked(*newest_good([checkpoint_at(path) for path in paths[::-1]], damaged), flag, source)


def _best_of_copied_run(source: Path) -> Path:
    """Return the best checkpoint if a path is that of the link `best`, and copying has made it a folder."""
    if source.name != BEST or source.parent.name != CHECKPOINTS or source.is_symlink():
        return source
    listed = list_run(source.parent.parent)
    newest, _ = newest_good(listed.saved)
    best = None if newest is None else best_of(saved_by_run(newest.manifest, listed.saved))
    return source if best is None else best.path


def checkpoints_at(source: Path) -> list[Path]:
    """Return the checkpoint at a path, possibly damaged, or the checkpoints of the run there, newest first."""
    if is_folder(source) and (is_committed(source) or form_of(source) is not None):
        return [source]
    return [checkpoint.path for checkpoint in reversed(checkpoints_of_run(run_of(source)))]


def newest_good(
    checkpoints: Sequence[Checkpoint], damaged: Mapping[str, str] = MappingProxyType({})
) -> tuple[CheckpointRef | None, list[str]]:
    """Return a run's newest checkpoint without a known fault, and the faults of those that are newer.

    Names and sizes of its files are those in the manifest.

    Args:
        checkpoints: the newest last, by the rule for one place.
        damaged: known faults, by `CheckpointRef.source`.
    """
    faults = list[str]()
    newest_first = checkpoints[::-1]
    here = _first_good([(saved, saved.path) for saved in newest_first if saved.is_here], damaged, faults)
    there = _first_good([(saved, saved.copy) for saved in newest_first if saved.copy is not None], damaged, faults)
    both = [good for good in (here, there) if good is not None]
    manifest = newest(*([good.manifest] if good is not None else [] for good in (here, there)))
    for checkpoint in newest_first if both else ():
        if checkpoint.kind is None and checkpoint.step > both[0].manifest.step:
            _first_good([(checkpoint, checkpoint.path)], damaged, faults)
    return next((good for good in both if good.manifest is manifest), None), faults


def _first_good(
    places: Iterable[tuple[Checkpoint, Path | Copy]], damaged: Mapping[str, str], faults: list[str]
) -> CheckpointRef | None:
    """Return the first checkpoint without a fault, in its folder or as a copy; add the faults of others to `faults`."""
    for checkpoint, place in places:
        try:
            if str(place) in damaged:
                raise CheckpointError(damaged[str(place)])
            copy = place if isinstance(place, Copy) else None
            manifest = read_manifest(checkpoint.path) if copy is None else copy.manifest
            return CheckpointRef(checkpoint.path, manifest, weights_only=not manifest.data, copy=copy)
        except CheckpointError as error:
            faults.append(str(error))
    return None


def _checked(chosen: CheckpointRef | None, faults: Sequence[str], flag: str, source: Path | str) -> CheckpointRef:
    """Return a checkpoint with the faults of newer ones; raise a CheckpointError with the faults if there is none."""
    if chosen is None:
        lines = "\n".join(f"  {line}" for line in faults)
        raise CheckpointError(f"{flag}={source} holds no good checkpoint:\n{lines}\nRepair one, or give another {flag}")
    return replace(chosen, damaged=tuple(faults))


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path is a folder or below it, with links resolved."""
    return real_path(path).is_relative_to(real_path(folder))
