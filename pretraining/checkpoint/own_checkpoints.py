"""Checkpoints of a run, in its folder and in its mirror: the list that every start and every return chooses from.

    <run>/checkpoints/: committed checkpoints --+-> `own_checkpoints`: those that the run may continue from
    mirror: complete copies, those set aside  --+

A run that returns to an older checkpoint sets the newer ones aside, in its folder and in its mirror. A kill, or a start
on another machine, can leave one side behind. That side still has a checkpoint that the other side has set aside. On
that side, only checkpoints up to the newest one that both sides hold count: the run has given up the later ones.

The record of what is set aside may be lost. So the side with the newest return or rollback decides (`branches`): of the
other side, only checkpoints count that the newest one of the deciding side continues. Within a side, all count: the
user may have moved them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pretraining.checkpoint.branches import Point, continues, latest_number, number_of
from pretraining.checkpoint.forms import read_if_good
from pretraining.checkpoint.manifest import Manifest
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    Checkpoint,
    Copy,
    checkpoint_from,
    checkpoints_set_aside,
    committed_checkpoints,
    place_in_run,
)
from pretraining.errors import CheckpointError


@dataclass(frozen=True)
class Copies:
    """Checkpoints in an object store.

    Attributes:
        complete: by name, ordered by step.
        set_aside: manifests of copies that the run has set aside, by name.
        incomplete: number of damaged or incomplete copies.
    """

    complete: Mapping[str, Copy] = field(default_factory=dict)
    set_aside: Mapping[str, Manifest] = field(default_factory=dict)
    incomplete: int = 0


NO_COPIES = Copies()


@dataclass(frozen=True)
class OwnCheckpoints:
    """Checkpoints that a run may continue from.

    Attributes:
        current: the highest step last.
        given_up: checkpoints in the folder that the run has gone back from on another machine.
        given_up_copies: names of complete copies that the run has gone back from, although they are not set aside.
        copies: names of all complete copies.
    """

    current: tuple[Checkpoint, ...] = ()
    given_up: tuple[Path, ...] = ()
    given_up_copies: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()


def own_checkpoints(run: Path, copies: Copies) -> OwnCheckpoints:
    """List the checkpoints of a run in its folder and in its mirror.

    Raises:
        CheckpointError: the folder holds only checkpoints that the mirror has set aside.
    """
    here, complete, set_aside = committed_checkpoints(run), copies.complete, copies.set_aside
    documents = {each.path.name: read_if_good(each.path) for each in here if each.path.name in {*complete, *set_aside}}
    in_both = [copy.manifest for name, copy in complete.items() if documents.get(name) == copy.manifest]
    shared = max((manifest.step for manifest in in_both), default=-1)
    kept = here
    if any(documents.get(name) == manifest for name, manifest in set_aside.items()):
        kept = [each for each in here if each.step <= shared]
        if not kept and not complete:
            raise CheckpointError(
                "holds only checkpoints that its mirror has set aside: rename a set_aside.json there to manifest.json, "
                "or give another --ckpt_save_path and --ckpt_mirror_path",
                path=run,
            )
    gone = [path for path in checkpoints_set_aside(run) if path.name in complete]
    if any(read_if_good(path) == complete[path.name].manifest for path in gone):
        complete = {name: copy for name, copy in complete.items() if copy.manifest.step <= shared}
    kept, complete = _without_older_branches(kept, complete, documents)
    by_name = {each.path.name: replace(each, copy=complete.get(each.path.name)) for each in kept}
    for name, copy in complete.items():
        own = by_name.get(name)
        if own is None or own.kind is None or _is_saved_again(copy.manifest, own):
            facts = checkpoint_from(run / CHECKPOINTS / name, copy.manifest)
            by_name[name] = replace(facts, is_here=own is not None, copy=copy)
    current = sorted(by_name.values(), key=place_in_run)
    given_up = tuple(each.path for each in here if each not in kept and each.has_save_name)
    given_up_copies = tuple(name for name in copies.complete if name not in complete)
    return OwnCheckpoints(tuple(current), given_up, given_up_copies, tuple(copies.complete))


def _without_older_branches(
    here: list[Checkpoint], complete: Mapping[str, Copy], documents: Mapping[str, Manifest | None]
) -> tuple[list[Checkpoint], Mapping[str, Copy]]:
    """Return the checkpoints of both sides without those that the newest return or rollback has given up."""
    local, there = [each for each in here if each.kind is not None], [copy.manifest for copy in complete.values()]
    if not local or not there or not local[-1].branches or not there[-1].branches:
        return here, complete  # an earlier version has saved the newest checkpoint, and knew no branches
    newest, newest_copy = local[-1], there[-1]
    mine, theirs = latest_number(local), latest_number(there)

    def stays(name: str, each: Point, decisive: Point) -> bool:
        is_in_both = name in complete and documents.get(name) == complete[name].manifest
        return is_in_both or not each.branches or continues(each, decisive) or continues(decisive, each)

    if theirs > mine or (theirs == mine and not stays("", newest, newest_copy)):  # unseen by each other: the mirror's
        here = [each for each in here if stays(each.path.name, each, newest_copy)]
    elif mine > theirs:
        complete = {name: copy for name, copy in complete.items() if stays(name, copy.manifest, newest)}
    return here, complete


def _is_saved_again(copy: Manifest, own: Checkpoint) -> bool:
    """Return whether another machine has saved a step again, after a rollback to it or after its evaluation."""
    is_evaluated = own.cost is None and copy.cost_of_step is not None
    return copy.step == own.step and (number_of(copy) > number_of(own) or is_evaluated)
