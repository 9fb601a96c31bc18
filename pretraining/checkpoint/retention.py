"""Which checkpoints stay, and which one is the best.

    kept always    the newest, the best, and every final one; the newest without an update left out just before it
    kept           the newest `keep_last` of those saved on an interval, all of them by default
    superseded     a preemption checkpoint by any newer one, a checkpoint that was the best by the next best

Only what is committed counts, up to the step that was saved last: the start passed over newer ones as damaged. A copy,
or one under another name than its save gave it, is the user's: it neither counts nor goes.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pretraining.checkpoint.run_folder import BEST, CHECKPOINTS, Checkpoint, checkpoint_at, committed_checkpoints
from pretraining.checkpoint.writer import remove_checkpoint
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import exists, flush_folder, link_atomic

log = logging.getLogger(__name__)

SET_ASIDE = "set_aside_"
"""How folders begin that hold checkpoints which a run has gone back from."""


def tidy_up(run: Path, newest: Path, keep_last: int | None, protected: Collection[Path] = ()) -> None:
    """Point `best` to the best checkpoint and remove what is superseded; where that fails, warn.

    Call it after a commit, and at a start: a kill may have come in between.

    Args:
        newest: the checkpoint that was just committed, or that the run goes on from.
        keep_last: how many to keep; None = all.
        protected: not to be removed now.
    """
    try:
        own = checkpoint_at(newest)
        if own.kind is None:  # a network file system may lose sight of it for a moment
            raise CheckpointError("cannot be read again", path=newest)
        saved = [each for each in _saved(run) if each.step <= own.step]
    except (OSError, PretrainError) as error:
        log.warning("nothing older than %s is removed: %s", newest, error)
        return
    best = best_of(saved)
    _point_to_best(run, best)
    for each in superseded(saved, own, best, keep_last):
        if each.path not in protected:
            remove_checkpoint(each.path)


def superseded(
    saved: Sequence[Checkpoint], newest: Checkpoint, best: Checkpoint | None, keep_last: int | None
) -> list[Checkpoint]:
    """Return what has to go of all checkpoints up to the newest, in the order of their steps."""
    # A run that diverges gives up those that were saved while updates were left out, and goes back to this one.
    sound = [each for each in (*saved, newest) if not each.skipped_in_a_row]
    removable = [each for each in saved if each not in (newest, best, *sound[-1:])]
    passing = [each for each in removable if each.kind in ("preempt", "best")]
    regular = [each for each in saved if each.kind not in ("preempt", "best")]
    too_old = regular[:-keep_last] if keep_last is not None else []
    return passing + [each for each in too_old if each in removable and each.kind != "final"]


def best_of(saved: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the one with the lowest evaluation loss, by the sets that decide now.

    Of equals the first, which was saved when that loss was found.
    """
    evaluated = [each for each in saved if each.evaluation_loss is not None]
    newest = max(evaluated, key=lambda each: each.step, default=None)
    evaluated = [each for each in evaluated if newest is not None and each.decided_by == newest.decided_by]
    return min(evaluated, key=lambda each: (each.evaluation_loss, each.step), default=None)


def _saved(run: Path) -> list[Checkpoint]:
    """Return what saves have left in a run; a start names what is damaged, which is nobody's to remove."""
    return [each for each in committed_checkpoints(run) if each.is_as_saved and each.kind is not None]


def set_aside(run: Path, checkpoints: Sequence[Path]) -> None:
    """Move checkpoints of a run, in order, to where no start looks and nothing is removed: set_aside_<time>, in UTC.

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
    _point_to_best(run, best_of(_saved(run)))


def _point_to_best(run: Path, best: Checkpoint | None) -> None:
    """Make the relative link `best` of a run lead to the best checkpoint, or remove it where there is none.

    Where that fails, or something else has the name, which is then the user's, it warns.
    """
    link = run / CHECKPOINTS / BEST
    try:
        if exists(link) and not link.is_symlink():
            raise FileExistsError(errno.EEXIST, "it is no link that a save has made")
        if best is None:
            link.unlink(missing_ok=True)
        elif not (link.is_symlink() and link.readlink() == Path(best.path.name)):
            link_atomic(link, best.path.name)
    except OSError as error:
        log.warning("%s cannot be replaced: %s", link, error.strerror)
