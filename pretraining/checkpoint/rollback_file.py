"""rollback.json: samples that a run leaves out after a rollback, until a checkpoint holds them.

a run diverges -> rollback.json -> checkpoints are given up -> trained again, without the samples -> a save
                                                                                                       |
a kill in between: the next start gives up what is left, and leaves the samples out            rollback.json goes
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretraining.checkpoint.manifest import read_document
from pretraining.config.training import DataConfig
from pretraining.errors import CheckpointError
from pretraining.files import checked_values, exists, read_json, with_checksum, write_atomic, writing_into

log = logging.getLogger(__name__)

ROLLBACK_FILE = "rollback.json"


@dataclass(frozen=True)
class Rollback:
    """What a run has gone back for.

    Attributes:
        first_step: the first update that was left out; checkpoints from it on are given up.
        samples: (first, end) of what is left out, as global indices.
    """

    first_step: int
    samples: tuple[tuple[int, int], ...]

    def is_in(self, checkpoint: Path) -> bool:
        """Whether the state of the data in a checkpoint leaves all of the samples out."""
        from pretraining.data.sampling.mixture import Skipped  # here: `list` does without numpy

        try:
            skipped = read_document(checkpoint).data.get("skipped", [])
        except CheckpointError:
            return False
        return not Skipped(self.samples).without(Skipped((begin, end) for begin, end in skipped))


def write_rollback(run: Path, rollback: Rollback) -> None:
    """Keep a rollback in a run's folder; a CheckpointError if it cannot be written."""
    with writing_into(run):
        write_atomic(run / ROLLBACK_FILE, json.dumps(with_checksum(asdict(rollback))) + "\n")


def read_rollback(run: Path) -> Rollback | None:
    """Return the rollback that a run's folder holds; None without one, or with a warning if it is damaged."""
    path = run / ROLLBACK_FILE
    if not exists(path):
        return None
    try:
        values = checked_values(read_json(path))
        return Rollback(int(values["first_step"]), tuple((int(begin), int(end)) for begin, end in values["samples"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning(
            "%s is damaged (%s): the samples of the last rollback are not known and are trained on again, unless "
            "--skip_samples names them; the newest rollback in logs/events.jsonl does",
            path,
            error,
        )
        return None


def without_samples(data: DataConfig, ranges: Iterable[tuple[int, int]]) -> DataConfig:
    """Return settings that leave out more samples, given as (first, end)."""
    return replace(data, skip_samples=(*data.skip_samples, *(f"{begin}-{end - 1}" for begin, end in ranges)))


def forget_rollback(run: Path, newest: Path) -> None:
    """Remove the file of a run once its newest checkpoint leaves the samples out."""
    rollback = read_rollback(run)
    if rollback is not None and rollback.is_in(newest):
        (run / ROLLBACK_FILE).unlink()
