"""Progress of a run, and intervals, which depend on it.

    Interval + TrainState after each step  --is_due-->  report, evaluate, save?

Whether an interval is due depends only on the progress of the run, not on the time of the last event. So intervals do
not drift, and a resumed run keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from pretraining.durations import Duration

PENDING_EVALUATION, PENDING_TASKS = "owed", "owed_tasks"
"""Keys in checkpoints: whether an evaluation of these weights, on sets or on tasks, is due and not done."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run; `seconds` of training are on the clock that all ranks share."""

    steps: int
    tokens: int
    seconds: float = 0.0


@dataclass
class TrainState:
    """State of the training loop, equal on all ranks after every step.

    Attributes:
        total_steps: length of the run.
        stop_step: last step of this invocation, at most `total_steps`.
        tokens_per_step: tokens per step.
        progress, before: progress after and before the last step.
        early_end: reason to finish the run before its last step; "" = none.
        stop: agreed request to stop before `stop_step`; 0 = none (train/preemption.py).
    """

    total_steps: int
    stop_step: int
    tokens_per_step: int
    progress: Progress
    before: Progress = field(init=False)
    early_end: str = field(init=False, default="")
    stop: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.before = self.progress

    @property
    def step(self) -> int:
        """Updates done, including skipped ones."""
        return self.progress.steps

    @property
    def finished(self) -> bool:
        """Whether the run is complete, or finished early."""
        return self.step >= self.total_steps or bool(self.early_end)

    @property
    def preempted(self) -> bool:
        """Whether a request stops this invocation now."""
        return self.stop != 0

    @property
    def stopping(self) -> bool:
        """Whether this invocation takes no further step."""
        return self.preempted or self.finished or self.step >= self.stop_step

    def advance(self, seconds: float, stop: int = 0) -> None:
        """Count a step; `seconds` is the shared clock, `stop` the agreed request to stop."""
        self.before = self.progress
        self.progress = Progress(self.step + 1, self.progress.tokens + self.tokens_per_step, seconds)
        self.request_stop(stop)

    def end_early(self, reason: str) -> None:
        """Make this step the last one of the run; call it on every rank."""
        self.early_end = reason

    def request_stop(self, stop: int) -> None:
        """Store the first agreed request to stop; 0 = no request."""
        self.stop = self.stop or stop


@dataclass(frozen=True)
class Interval:
    """Interval between events, 0 = never; `training_tokens` of one pass over the datasets convert epochs."""

    every: Duration
    training_tokens: int | None

    def is_due(self, state: TrainState) -> bool:
        """Return whether the last step reached or crossed a multiple of the interval.

        Raises:
            ConfigError: the interval is in epochs, and `training_tokens` is None.
        """
        if self.every.amount == 0:
            return False
        if self.every.unit in ("steps", "seconds"):
            unit, length = self.every.unit, Fraction(self.every.amount)
        else:
            unit, length = "tokens", self.every._in_tokens(self.training_tokens)
        if length == 0:  # epochs of an empty dataset
            return False
        return bool(getattr(state.progress, unit) // length > getattr(state.before, unit) // length)
