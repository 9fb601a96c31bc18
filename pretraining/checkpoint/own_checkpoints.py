"""Checkpoints of a run, in its folder and in its mirror: the list that every start and every return chooses from.

    <run>/checkpoints/: committed checkpoints  --+
    mirror: complete copies                    --+-> `list_run` -> `newest_good` -> `branches.own`
    set_aside_<time>/, here and in the mirror  --+

A run that goes back sets the checkpoints aside that its newest one does not continue. Until then the rule of `branches`
keeps starts from them.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from pretraining.checkpoint.branches import Branches, begin_branch, identity_of, is_given_up, newest
from pretraining.checkpoint.forms import read_manifest
from pretraining.checkpoint.manifest import MANIFEST, RUN_STATE, Manifest
from pretraining.checkpoint.run_folder import (
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
    run_id_of,
)
from pretraining.errors import CheckpointError
from pretraining.files import flush_folder, write_atomic, writing_into
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
        """The newest checkpoint in the mirror; None without any."""
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
    return RunCheckpoints(run, run_id, tuple(by_age(saved)), tuple(each for each in aside if each.kind is not None))


def _only_in_mirror(run: Path, name: str, copy: Copy) -> Checkpoint:
    return replace(checkpoint_from(run / CHECKPOINTS / name, copy.manifest), is_here=False, copy=copy)


class Found(NamedTuple):
    """Checkpoint without a known fault: names and sizes of its files are those in the manifest.

    Attributes:
        place: its folder, or the copy to fetch.
    """

    checkpoint: Checkpoint
    place: Path | Copy
    manifest: Manifest


def newest_good(
    checkpoints: Sequence[Checkpoint], damaged: Mapping[str, str] = MappingProxyType({})
) -> tuple[Found | None, list[str]]:
    """Return a run's newest checkpoint without a known fault, and the faults of those that are newer.

    Args:
        checkpoints: the newest last, by the rule for one place.
        damaged: known faults, by path or address.
    """
    faults = list[str]()
    newest_first = checkpoints[::-1]
    here = _first_good([(each, each.path) for each in newest_first if each.is_here], damaged, faults)
    there = _first_good([(each, each.copy) for each in newest_first if each.copy is not None], damaged, faults)
    both = [found for found in (here, there) if found is not None]
    manifest = newest(*([found.manifest] if found is not None else [] for found in (here, there)))
    for checkpoint in newest_first if both else ():
        if checkpoint.kind is None and checkpoint.step > both[0].manifest.step:
            _first_good([(checkpoint, checkpoint.path)], damaged, faults)
    return next((found for found in both if found.manifest is manifest), None), faults


def first_good_place(checkpoint: Checkpoint, damaged: Mapping[str, str], faults: list[str]) -> Found | None:
    """Return a checkpoint in its folder or else its copy; None if both have faults, which are added to `faults`."""
    places = [
        place for place in (checkpoint.path if checkpoint.is_here else None, checkpoint.copy) if place is not None
    ]
    return _first_good([(checkpoint, place) for place in places], damaged, faults)


def _first_good(
    places: Iterable[tuple[Checkpoint, Path | Copy]], damaged: Mapping[str, str], faults: list[str]
) -> Found | None:
    for checkpoint, place in places:
        try:
            if str(place) in damaged:
                raise CheckpointError(damaged[str(place)])
            return Found(checkpoint, place, place.manifest if isinstance(place, Copy) else read_manifest(place))
        except CheckpointError as error:
            faults.append(str(error))
    return None


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

    Those that a user has renamed stay, and those of other runs.

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
