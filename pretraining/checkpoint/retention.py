"""Retention: which checkpoints are kept, and which one is best.

    always kept    the newest, the best, and every final one; the newest one without skipped updates just before it
    kept           the newest `keep_last` interval checkpoints; all of them by default
    superseded     a preemption checkpoint by any newer checkpoint, a former best one by the next best

Only the run's own checkpoints count (`branches.own`), without damaged ones. A copy or a renamed checkpoint belongs to
the user: it neither counts nor is removed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pretraining.checkpoint.branches import own
from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, Checkpoint, by_age, checkpoint_at, checkpoints_of_run
from pretraining.checkpoint.writer import remove_checkpoint
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import exists, link_atomic

log = logging.getLogger(__name__)


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
    _link_best(run, best)
    for checkpoint in superseded(saved, head, best, keep_last):
        if checkpoint.path not in protected:
            remove_checkpoint(checkpoint.path)


def saved_by_run(newest: Checkpoint, checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
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
