"""Best value that a run has reached in its evaluations, for the best checkpoint and for early stopping.

    Evaluator --record--> Best --is_best_at--> CheckpointManager: save the best checkpoint
                               --stop_if_due--> early stopping

A run has a `Best` of its evaluation loss. If `--best_by` names a number of a task or an evaluator, the run has a second
`Best` of this number, which decides in place of the loss. Values of different definitions are not compared.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pretraining.progress import TrainState

log = logging.getLogger(__name__)


class Measure(NamedTuple):
    """Number of an evaluation.

    Attributes:
        name: name in messages and, of a task or an evaluator, in `--best_by`.
        key: name among the values of an evaluation.
        definition: digest of everything that it depends on besides the model; None = this run does not measure it.
    """

    name: str
    key: str
    definition: str | None
    larger_is_better: bool = False


@dataclass
class Best:
    """Newest and best value of a measure; part of checkpoints. Values that are not finite count as no improvement.

    Attributes:
        limit: evaluations in a row without a better value that finish the run; 0 = never.
        value: newest value; None = there was none.
        step: step of the newest value.
        best: best value so far.
        in_a_row: evaluations since the best value; without a limit, they are not counted.
        best_step: step at which this invocation found the best value; None = it did not.
    """

    measure: Measure
    limit: int = 0
    value: float | None = None
    step: int | None = None
    best: float | None = None
    in_a_row: int = 0
    best_step: int | None = None

    def record(self, value: float, step: int) -> None:
        """Add the value of an evaluation; the same on every rank."""
        self.in_a_row = self.in_a_row + 1 if self.limit else 0
        if not math.isfinite(value):
            return
        self.value, self.step = value, step
        is_larger_better = self.measure.larger_is_better
        if self.best is None or (value > self.best if is_larger_better else value < self.best):
            self.best, self.best_step, self.in_a_row = value, step, 0

    def is_best_at(self, step: int) -> bool:
        """Return whether this invocation found the best value at this step."""
        return self.best_step == step

    def stop_if_due(self, state: TrainState) -> None:
        """Finish the run if the limit is reached, possibly in an earlier invocation."""
        if 0 < self.limit <= self.in_a_row:
            name = self.measure.name
            wanted = f"finite {name}" if self.best is None else f"better {name} than {self.best:.4f}"
            place = "the last evaluation" if self.in_a_row == 1 else f"{self.in_a_row} evaluations in a row"
            state.end_early(f"no {wanted} in {place}, --early_stopping_evaluations={self.limit}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; empty before the first evaluation."""
        if self.value is None and not self.in_a_row:
            return {}
        values = {"value": self.value, "step": self.step, "best": self.best, "in_a_row": self.in_a_row}
        name, _, definition, larger_is_better = self.measure
        return {"name": name, "definition": definition, "larger_is_better": larger_is_better, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state if it is of the same measure; a run that does not measure it keeps it for later ones."""
        definition = self.measure.definition or state["definition"]
        if (self.measure.name, definition) == (state["name"], state["definition"]):
            self.measure = self.measure._replace(definition=definition)
            self.value, self.step, self.best, self.in_a_row = (
                state[name] for name in ("value", "step", "best", "in_a_row")
            )
        elif state["best"] is not None:
            log.info(
                "the best %s so far, %.4f, is of other evaluation data: the next evaluation begins the search for the "
                "best checkpoint and the patience of early stopping again",
                state["name"],
                state["best"],
            )
