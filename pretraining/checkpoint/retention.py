"""Retention: which checkpoints are kept, and which one is best.

    always kept    the newest, the best, and every final one; the newest one without skipped updates just before it
    kept           the newest `keep_last` interval checkpoints; all of them by default
    superseded     a preemption checkpoint by any newer checkpoint, a former best one by the next best

Only committed checkpoints up to the last saved step count; newer ones were skipped as damaged at the start. A copy or a
renamed checkpoint belongs to the user: it neither counts nor is removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pretraining.checkpoint.run_folder import (
    BEST,
    CHECKPOINTS,
    SET_ASIDE,
    Checkpoint,
    checkpoint_at,
    committed_checkpoints,
)
from pretraining.checkpoint.writer import remove_checkpoint
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import exists, flush_folder, link_atomic

log = logging.getLogger(__name__)


def apply_retention(run: Path, newest: Path, keep_last: int | None, protected: Collection[Path] = ()) -> None:
    """Point the link `best` to the best checkpoint, and remove superseded ones; warn on failure.

    Call it after a commit, and at a start, since a kill may have come between the two.

    Args:
        newest: checkpoint that was just committed, or the start point.
        keep_last: interval checkpoints to keep; None = all.
    """
    try:
        own = checkpoint_at(newest)
        if own.kind is None:  # a network file system may hide it for a moment
            raise CheckpointError("cannot be read again", path=newest)
        saved = [each for each in _saved_checkpoints(run) if each.step <= own.step]
    except (OSError, PretrainError) as error:
        log.warning("nothing older than %s is removed: %s", newest, error)
        return
    best = best_of(saved)
    _link_best(run, best)
    for each in superseded(saved, own, best, keep_last):
        if each.path not in protected:
            remove_checkpoint(each.path)


def superseded(
    saved: Sequence[Checkpoint], newest: Checkpoint, best: Checkpoint | None, keep_last: int | None
) -> list[Checkpoint]:
    """Return the checkpoints to remove, of all up to the newest, ordered by step."""
    # A divergence drops checkpoints saved while updates were skipped, and goes back to the newest sound one.
    sound = [each for each in (*saved, newest) if not each.skipped_in_a_row]
    removable = [each for each in saved if each not in (newest, best, *sound[-1:])]
    passing = [each for each in removable if each.kind in ("preempt", "best")]
    regular = [each for each in saved if each.kind not in ("preempt", "best")]
    too_old = regular[:-keep_last] if keep_last is not None else []
    return passing + [each for each in too_old if each in removable and each.kind != "final"]


def best_of(saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest cost, as the newest evaluation counts it.

    If costs are equal, the first checkpoint wins: it was saved when the cost was found.
    """
    evaluated = [each for each in saved if each.cost is not None]
    newest = max(evaluated, key=lambda each: each.step, default=None)
    evaluated = [each for each in evaluated if newest is not None and each.decided_by == newest.decided_by]
    return min(evaluated, key=lambda each: (each.cost, each.step), default=None)


def _saved_checkpoints(run: Path) -> list[Checkpoint]:
    """Return the readable checkpoints that saves of this run have committed."""
    return [each for each in committed_checkpoints(run) if each.has_save_name and each.kind is not None]


def set_aside(run: Path, checkpoints: Sequence[Path]) -> None:
    """Move checkpoints, in order, to the folder set_aside_<UTC time>, which starts and retention ignore.

    Raises:
        CheckpointError: one cannot be moved.
    """
    folder = run / CHECKPOINTS / f"{SET_ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    try:
        for path in checkpoints:
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
            log.info("%s is set aside: moved to %s", path, folder)
        flush_folder(run / CHECKPOINTS)
    except OSError as error:
        raise CheckpointError(f"cannot be moved to {folder}: {error.strerror}", path=error.filename) from None
    _link_best(run, best_of(_saved_checkpoints(run)))


def set_aside_newer(run: Path, first_step: int, saved: Path | None = None) -> list[Path]:
    """Set aside the checkpoints from a step on, and return their paths: those that a run drops which goes back.

    Args:
        saved: checkpoint that stays.
    """
    dropped = [each.path for each in committed_checkpoints(run) if each.step >= first_step and each.path != saved]
    if dropped:
        set_aside(run, dropped)
    return dropped


def _link_best(run: Path, best: Checkpoint | None) -> None:
    """Point the relative link `best` to the best checkpoint, or remove it if there is none; warn on failure."""
    link = run / CHECKPOINTS / BEST
    try:
        if exists(link) and not link.is_symlink():
            raise FileExistsError(errno.EEXIST, "it is no link")
        if link.is_symlink() and not exists(link):
            now = "no other one here was evaluated" if best is None else f"the best one here is {best.path.name} now"
            log.warning("the best checkpoint, %s, is gone from %s: %s", link.readlink(), run, now)
        if best is None:
            link.unlink(missing_ok=True)
        elif not (link.is_symlink() and link.readlink() == Path(best.path.name)):
            link_atomic(link, best.path.name)
    except OSError as error:
        log.warning("%s cannot be replaced: %s", link, error.strerror)
