"""Checkpoints of a run, in its folder and in its mirror: which there are, which are kept, and which are set aside.

    <run>/checkpoints/: committed checkpoints  --+
    mirror: complete copies                    --+-> `list_run` -> `start_point.newest_good` -> `branches.own`
    set_aside_<time>/, here and in the mirror  --+

A run that goes back sets the checkpoints aside that its newest one does not continue. Until then the rule of `branches`
keeps starts from them. Retention removes others:

    always kept    the newest, the best, and every final one; the newest one without skipped updates just before it
    kept           the newest `keep_last` interval checkpoints; all of them by default
    superseded     a preemption checkpoint by any newer checkpoint, a former best one by the next best

Only the run's own checkpoints count (`branches.own`), without damaged ones. A copy or a renamed checkpoint belongs to
the user: it neither counts nor is removed.
"""

from __future__ import annotations

import errno
import json
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pretraining.checkpoint.branches import Branches, Point, begin_branch, identity_of, is_given_up, own
from pretraining.checkpoint.manifest import MANIFEST, RUN_STATE, Manifest
from pretraining.checkpoint.run_folder import (
    BEST,
    CHECKPOINTS,
    SET_ASIDE,
    Checkpoint,
    Copy,
    by_age,
    checkpoint_at,
    checkpoint_from,
    checkpoints_of_run,
    checkpoints_set_aside,
    committed_checkpoints,
    remove_checkpoint,
    run_id_of,
    temporary_name,
)
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import exists, flush_folder, is_folder, link_atomic, reason_of, write_atomic, writing_into
from pretraining.text import count_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copies:
    """Checkpoints in an object store.

    Attributes:
        complete: by name.
        set_aside: by name with the folder set_aside_<time>.
        incomplete: number of damaged or incomplete copies.
    """

    complete: Mapping[str, Copy] = field(default_factory=dict)
    set_aside: Mapping[str, Copy] = field(default_factory=dict)
    incomplete: int = 0


NO_COPIES = Copies()


@dataclass(frozen=True)
class RunCheckpoints:
    """Checkpoints that a run has saved, in its folder and in its mirror.

    Attributes:
        run_id: empty if the run has saved none.
        saved: the newest last, by the rule for one place. Those with an unreadable manifest come first.
        set_aside: those that the run has set aside, in order.
    """

    run: Path
    run_id: str
    saved: tuple[Checkpoint, ...]
    set_aside: tuple[Checkpoint, ...]

    @property
    def mirrored(self) -> Checkpoint | None:
        """The newest checkpoint in the mirror; None if it has none."""
        return next((checkpoint for checkpoint in reversed(self.saved) if checkpoint.copy is not None), None)


def list_run(run: Path, copies: Copies = NO_COPIES) -> RunCheckpoints:
    """List the checkpoints of a run in its folder and in its mirror."""
    complete = dict(copies.complete)
    listed = list[Checkpoint]()
    for checkpoint in committed_checkpoints(run):
        copy, is_readable = complete.get(checkpoint.path.name), checkpoint.kind is not None
        if copy is not None and (not is_readable or identity_of(checkpoint) == identity_of(copy.manifest)):
            del complete[copy.name]
            facts = checkpoint if is_readable else checkpoint_from(checkpoint.path, copy.manifest)
            checkpoint = replace(facts, copy=copy)
        listed.append(checkpoint)
    listed += [_only_in_mirror(run, name, copy) for name, copy in complete.items()]
    run_id = run_id_of(run, listed)
    saved = [checkpoint for checkpoint in listed if checkpoint.kind is None or checkpoint.run_id == run_id]
    aside = [checkpoint_at(path) for path in checkpoints_set_aside(run)]
    here = {identity_of(checkpoint) for checkpoint in aside if checkpoint.kind is not None}
    others = {name: copy for name, copy in copies.set_aside.items() if identity_of(copy.manifest) not in here}
    aside += [_only_in_mirror(run, name, copy) for name, copy in others.items()]
    return RunCheckpoints(
        run, run_id, tuple(by_age(saved)), tuple(checkpoint for checkpoint in aside if checkpoint.kind is not None)
    )


def _only_in_mirror(run: Path, name: str, copy: Copy) -> Checkpoint:
    return replace(checkpoint_from(run / CHECKPOINTS / name, copy.manifest), is_here=False, copy=copy)


# Changes in a run's folder


def branches_of_start(
    run: Path, start: Manifest | None, step: int, copies: Copies, *, above: int, is_plain: bool
) -> Branches:
    """Begin the branch of a start that trains, and return the branches of the checkpoints that it will save.

    Args:
        start: checkpoint of the run to start from; None = the run begins.
        step: step of the start.
        copies: checkpoints in the mirror, listed since this process is its writer.
        above: number of the last branch that began in this folder.
        is_plain: whether the start resumes the newest checkpoint that it saw.
    """
    listed = list_run(run, copies)
    known = [*listed.saved, *listed.set_aside]
    return begin_branch(start, step, known, above=above, is_plain=is_plain, seen=listed.mirrored)


def return_to(checkpoint: Path, saved: Manifest, record: Mapping[str, Any], data: dict[str, Any]) -> None:
    """Make an older checkpoint the newest one of its run: give it another manifest, by one rename.

    Args:
        saved: its manifest until now, whose settings, losses and states stay.
        record: record of the run in the checkpoints of this start, with the new branch.
        data: position in the data.

    Raises:
        CheckpointError: the manifest cannot be written.
    """
    state = saved.state | {RUN_STATE: saved.state.get(RUN_STATE, {}) | record}
    document = replace(saved, state=state, data=data).document()
    with writing_into(checkpoint / MANIFEST):
        write_atomic(checkpoint / MANIFEST, json.dumps(document, indent=1))


def move_aside(run: Path, checkpoints: Sequence[Checkpoint]) -> Path:
    """Move checkpoints to a new folder set_aside_<UTC time>, which starts and retention ignore, and return it.

    Raises:
        CheckpointError: one cannot be moved.
    """
    folder = run / CHECKPOINTS / f"{SET_ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    try:
        for checkpoint in checkpoints:
            folder.mkdir(exist_ok=True)
            checkpoint.path.rename(folder / checkpoint.path.name)
        flush_folder(run / CHECKPOINTS)
    except OSError as error:
        raise CheckpointError(f"cannot be moved to {folder}: {error.strerror}", path=error.filename) from None
    return folder


def set_aside_others(run: Path, newest: Path) -> list[Path]:
    """Set aside the checkpoints that a run has given up, given its newest one, and return their former paths.

    Checkpoints that a user has renamed stay, and checkpoints of other runs.

    Raises:
        CheckpointError: one cannot be moved.
    """
    head = checkpoint_at(newest)
    others = [
        checkpoint
        for checkpoint in checkpoints_of_run(run)
        if checkpoint.kind is not None and checkpoint.has_save_name and is_given_up(checkpoint, head)
    ]
    if others:
        last = others[-1]
        folder = move_aside(run, others)
        request = shlex.join(("pretrain", "train", str(run), f"--resume_from_checkpoint={folder / last.path.name}"))
        log.info(
            "the run continues from step %d: %s up to step %d moved to %s. To go back to step %d: %s",
            head.step,
            count_of(len(others), "other checkpoint"),
            last.step,
            folder,
            last.step,
            request,
        )
    return [checkpoint.path for checkpoint in others]


# Retention: which checkpoints are kept, and which one is best


def apply_retention(run: Path, newest: Path, keep_last: int | None, protected: Collection[Path] = ()) -> None:
    """Point the link `best` to the best checkpoint, and remove superseded ones; warn on failure.

    Call it after a commit, and at a start, since a kill may have come between the two.

    Args:
        newest: checkpoint that was just committed, or the start point.
        keep_last: interval checkpoints to keep; None = all.
    """
    try:
        head = checkpoint_at(newest)
        if head.kind is None:  # a network file system may hide it for a moment
            raise CheckpointError("cannot be read again", path=newest)
        saved = saved_by_run(head, checkpoints_of_run(run))
    except (OSError, PretrainError) as error:
        log.warning("nothing older than %s is removed: %s", newest, error)
        return
    best = best_of(saved)
    _link_best(run, best, saved)
    for checkpoint in superseded(saved, head, best, keep_last):
        if checkpoint.path not in protected:
            remove_checkpoint(checkpoint.path)


def saved_by_run(newest: Point, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return the readable checkpoints that belong to a run and have the names of their saves, the newest last."""
    readable = [checkpoint for checkpoint in checkpoints if checkpoint.kind is not None and checkpoint.has_save_name]
    return by_age(own(newest, readable))


def superseded(
    saved: Sequence[Checkpoint], newest: Checkpoint, best: Checkpoint | None, keep_last: int | None
) -> list[Checkpoint]:
    """Return the checkpoints to remove, of all of a run, the newest last."""
    # A divergence drops checkpoints saved while updates were skipped, and goes back to the newest sound one.
    sound = [checkpoint for checkpoint in (*saved, newest) if not checkpoint.skipped_in_a_row]
    removable = [checkpoint for checkpoint in saved if checkpoint not in (newest, best, *sound[-1:])]
    passing = [checkpoint for checkpoint in removable if checkpoint.kind in ("preempt", "best")]
    regular = [checkpoint for checkpoint in saved if checkpoint.kind not in ("preempt", "best")]
    too_old = regular[:-keep_last] if keep_last is not None else []
    return passing + [checkpoint for checkpoint in too_old if checkpoint in removable and checkpoint.kind != "final"]


def best_of(saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest cost, as the newest evaluation counts it; the newest one is last.

    If costs are equal, the first checkpoint wins: it was saved when the cost was found.
    """
    evaluated = [checkpoint for checkpoint in saved if checkpoint.cost is not None]
    comparable = [checkpoint for checkpoint in evaluated if checkpoint.decided_by == evaluated[-1].decided_by]
    return min(comparable, key=lambda checkpoint: (checkpoint.cost, checkpoint.step), default=None)


def _link_best(run: Path, best: Checkpoint | None, saved: Sequence[Checkpoint]) -> None:
    """Point the relative link `best` to the best checkpoint, or remove it if there is none; warn on failure.

    Programs that follow links make it a folder, which is replaced if it is a copy of a checkpoint.
    """
    link = run / CHECKPOINTS / BEST
    try:
        if exists(link) and not link.is_symlink():
            original = next((each.path for each in saved if is_folder(link) and _holds(each.path, link)), None)
            if original is None:
                raise FileExistsError(errno.EEXIST, "it is no copy of a checkpoint here: rename or remove it")
            remove_checkpoint(link.rename(temporary_name(original)))
        if link.is_symlink() and not exists(link):
            now = "no other one here was evaluated" if best is None else f"the best one here is {best.path.name} now"
            log.warning("the best checkpoint, %s, is gone from %s: %s", link.readlink(), run, now)
        if best is None:
            link.unlink(missing_ok=True)
        elif not (link.is_symlink() and link.readlink() == Path(best.path.name)):
            link_atomic(link, best.path.name)
    except OSError as error:
        _warn_of_link(link, reason_of(error))


def _holds(checkpoint: Path, folder: Path) -> bool:
    """Return whether a checkpoint has the manifest of a folder, and files of all its names and sizes."""
    sizes, others = ({file.name: file.stat().st_size for file in each.iterdir()} for each in (folder, checkpoint))
    is_complete = MANIFEST in sizes and sizes.items() <= others.items()
    return is_complete and (folder / MANIFEST).read_bytes() == (checkpoint / MANIFEST).read_bytes()


@cache  # each save would repeat it
def _warn_of_link(link: Path, reason: str) -> None:
    log.warning("%s cannot be replaced: %s", link, reason)
