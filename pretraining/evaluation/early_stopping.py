"""Ends a run whose evaluations find nothing better any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretraining.progress import TrainState


@dataclass
class EarlyStopping:
    """Counts evaluations without a new lowest loss; part of the evaluator's state in checkpoints.

    Attributes:
        limit: this many in a row end the run; 0 = never.
        decided_by: the sets whose loss it is, sorted; empty = the held-out documents of all datasets, as in earlier
            versions. Counting begins again where others decide at a resume.
        best_loss: the lowest so far.
        in_a_row: evaluations since then.
    """

    limit: int = 0
    decided_by: tuple[str, ...] = ()
    best_loss: float | None = None
    in_a_row: int = 0

    def note(self, loss: float, state: TrainState) -> None:
        """Count an evaluation, and end the run if it was one too many; the same on every rank."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.in_a_row = loss, 0
        else:
            self.in_a_row += 1
        self.end_if_due(state)

    def end_if_due(self, state: TrainState) -> None:
        """End the run if there were as many in a row as end it, be it in an earlier invocation."""
        if 0 < self.limit <= self.in_a_row:
            wanted = "finite loss" if self.best_loss is None else f"loss below {self.best_loss:.4f}"
            where = "the last evaluation" if self.in_a_row == 1 else f"{self.in_a_row} evaluations in a row"
            state.end_early(f"no {wanted} in {where}, --early_stopping_evaluations={self.limit}")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, JSON-able: nothing that is as it was in earlier versions."""
        kept: dict[str, Any] = {"decided_by": list(self.decided_by)} if self.decided_by else {}
        return kept | ({"best_loss": self.best_loss, "in_a_row": self.in_a_row} if self.limit else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept, if it counted."""
        if "in_a_row" in state and tuple(state.get("decided_by", ())) == self.decided_by:
            self.best_loss, self.in_a_row = state["best_loss"], int(state["in_a_row"])
