"""True history of a run, whatever manifests say: what a checkpoint was trained from, and what each start gave up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pretraining.checkpoint.branches import Point, identity_of

Identity = tuple[str, int]
"""Id of a branch, and step."""


@dataclass
class Start:
    """A start that trains.

    Attributes:
        gave_up: checkpoints that it saw and that are not among those that it continues, if it is a return.
        known: returns whose checkpoints it saw.
    """

    is_return: bool
    gave_up: set[Identity]
    known: set[str]


@dataclass
class TrueHistory:
    """History of a run.

    Attributes:
        parent: of each checkpoint, the one that it was trained from.
        starts: by the id of their branch.
    """

    parent: dict[Identity, Identity | None] = field(default_factory=dict)
    starts: dict[str, Start] = field(default_factory=dict)

    def begin(self, branch: str, start: Point | None, seen: Iterable[Point], *, is_return: bool) -> None:
        """Add a start that sees these checkpoints, and begins a branch at one of them."""
        visible = {identity_of(point) for point in seen}
        line = set(self.ancestors(None if start is None else identity_of(start)))
        known = set().union(*(self.returns_of(identity) for identity in visible))
        self.starts[branch] = Start(is_return, visible - line if is_return else set(), known)

    def ancestors(self, identity: Identity | None) -> list[Identity]:
        """Return a checkpoint and those that it was trained from, the newest first."""
        line = list[Identity]()
        while identity is not None:
            line.append(identity)
            identity = self.parent[identity]
        return line

    def returns_of(self, identity: Identity) -> set[str]:
        """Return the returns on the way to a checkpoint."""
        return {branch for branch, _ in self.ancestors(identity) if self.starts[branch].is_return}

    def gives_up(self, head: Identity, mirrored: Point | None, local: Point | None) -> list[str]:
        """Return which of the newest checkpoints in both places belong to a return that gave up this checkpoint."""
        there, here = (set() if point is None else self.returns_of(identity_of(point)) for point in (mirrored, local))
        here = {by for by in here if head in self.starts[by].gave_up}
        return [
            f"given up, as the {name} says"
            for name, returns in (("mirror", there), ("folder", here))
            if any(self.is_given_up(head, by) for by in returns)
        ]

    def is_given_up(self, identity: Identity, by: str) -> bool:
        """Return whether a return gave up a checkpoint, or one before it, and nobody who knew that took it back."""
        for each in self.ancestors(identity):
            start = self.starts[each[0]]
            if start.is_return and by in start.known:
                return False
            if each in self.starts[by].gave_up:
                return True
        return False
