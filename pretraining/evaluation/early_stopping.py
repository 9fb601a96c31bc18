"""Early stopping of a run whose evaluation loss no longer falls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretraining.progress import TrainState


@dataclass
class EarlyStopping:
    """Counter of evaluations without a new lowest loss; part of the evaluator's state in checkpoints.

    Attributes:
        limit: evaluations in a row that stop the run; 0 = never.
        definition: of the evaluation sets of the loss (`definition_of`). A resume with another one resets the counter.
        best_loss: lowest loss so far.
        in_a_row: evaluations since the lowest loss.
    """

    limit: int = 0
    definition: str | None = None
    best_loss: float | None = None
    in_a_row: int = 0

    def count_evaluation(self, loss: float, state: TrainState) -> None:
        """Count an evaluation, and stop the run at the limit; the same on every rank."""
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.in_a_row = loss, 0
        else:
            self.in_a_row += 1
        self.stop_if_due(state)

    def stop_if_due(self, state: TrainState) -> None:
        """Stop the run if the limit is reached, possibly in an earlier invocation."""
        if 0 < self.limit <= self.in_a_row:
            wanted = "finite loss" if self.best_loss is None else f"loss below {self.best_loss:.4f}"
            where = "the last evaluation" if self.in_a_row == 1 else f"{self.in_a_row} evaluations in a row"
            state.end_early(f"no {wanted} in {where}, --early_stopping_evaluations={self.limit}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; without a limit it has no counter, as in earlier versions."""
        if not self.limit:
            return {}
        return {"definition": self.definition, "best_loss": self.best_loss, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counter, if the checkpoint has one for the same sets; earlier releases recorded no definition."""
        if "in_a_row" in state and state.get("definition") == self.definition:
            self.best_loss, self.in_a_row = state["best_loss"], int(state["in_a_row"])
