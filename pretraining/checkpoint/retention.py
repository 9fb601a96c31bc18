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
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pretraining.checkpoint.manifest import (
    BEST,
    CHECKPOINTS,
    Record,
    committed_checkpoints,
    record_of,
)
from pretraining.checkpoint.rollback_file import forget_rollback
from pretraining.checkpoint.writer import remove_checkpoint
from pretraining.errors import CheckpointError, PretrainError
from pretraining.files import exists, flush_folder, link_atomic

log = logging.getLogger(__name__)

SET_ASIDE = "set_aside_"
"""How folders begin that hold checkpoints which a run has gone back from."""


def tidy_up(run: Path, newest: Path, keep_last: int | None) -> None:
    """Point `best` to the best checkpoint and remove what is superseded; where that fails, warn.

    Call it after a commit, and at a start: a kill may have come in between.

    Args:
        newest: the checkpoint that was just committed, or that the run goes on from.
        keep_last: how many to keep; None = all.
    """
    try:
        own = record_of(newest)
        forget_rollback(run, newest)
        records = [record for record in list_records(run) if record.step <= own.step]
    except (OSError, PretrainError) as error:  # a network file system may lose sight of it for a moment
        log.warning("%s cannot be read again, and nothing older is removed: %s", newest, error)
        return
    best = best_of(records)
    point_to_best(run, best)
    for record in superseded(records, own, best, keep_last):
        try:
            remove_checkpoint(record.path)
        except OSError as error:
            log.warning("%s cannot be removed: %s", record.path, error)


def superseded(records: Sequence[Record], newest: Record, best: Record | None, keep_last: int | None) -> list[Record]:
    """Return what has to go of all checkpoints up to the newest, in the order of their steps."""
    # A run that diverges gives up those that were saved while updates were left out, and goes back to this one.
    sound = [record for record in (*records, newest) if not record.skipped_in_a_row]
    removable = [record for record in records if record not in (newest, best, *sound[-1:])]
    passing = [record for record in removable if record.kind in ("preempt", "best")]
    regular = [record for record in records if record.kind not in ("preempt", "best")]
    too_old = regular[:-keep_last] if keep_last is not None else []
    return passing + [record for record in too_old if record in removable and record.kind != "final"]


def best_of(records: Sequence[Record]) -> Record | None:
    """Return the one with the lowest evaluation loss, by the sets that decide now.

    Of equals the first, which was saved when that loss was found.
    """
    evaluated = [record for record in records if record.evaluation_loss is not None]
    newest = max(evaluated, key=lambda record: record.step, default=None)
    evaluated = [record for record in evaluated if newest is not None and record.decided_by == newest.decided_by]
    return min(evaluated, key=lambda record: (record.evaluation_loss, record.step), default=None)


def list_records(run: Path) -> list[Record]:
    """Return the checkpoints that saves have left in a run, by their steps, if their manifests can be read."""
    records = []
    for path in committed_checkpoints(run):
        with suppress(OSError, CheckpointError):  # a start names what is damaged; it is nobody's to remove
            records.append(record_of(path))
    return [record for record in records if record.as_saved]


def set_aside(run: Path, checkpoints: Sequence[Path]) -> Path:
    """Move checkpoints of a run to where no start looks and nothing is removed, in the order given.

    Returns:
        The folder that they are in now: checkpoints/set_aside_<time>, in UTC.

    Raises:
        CheckpointError: one cannot be moved.
    """
    folder = run / CHECKPOINTS / f"{SET_ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        for path in checkpoints:
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
        flush_folder(run / CHECKPOINTS)
    except OSError as error:
        raise CheckpointError(f"cannot be moved to {folder}: {error.strerror}", path=error.filename) from None
    point_to_best(run, best_of(list_records(run)))
    return folder


def point_to_best(run: Path, best: Record | None) -> None:
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
