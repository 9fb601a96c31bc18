"""What observers, evaluators and checkpoints share: the state of a run, and the question whether it is time to act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pretraining.config.durations import Duration, Progress, is_due


class RunState(Protocol):
    """How far a run is."""

    @property
    def before(self) -> Progress:
        """Progress before the last step."""

    @property
    def progress(self) -> Progress:
        """Progress after the last step."""

    @property
    def finished(self) -> bool:
        """Whether the whole run is done."""

    @property
    def preempted(self) -> bool:
        """Whether this invocation is to end now, done or not."""

    @property
    def stopping(self) -> bool:
        """Whether this invocation is done."""


@dataclass(frozen=True)
class Interval:
    """How often something happens.

    Attributes:
        every: the interval; an amount of 0 means never.
        training_tokens: tokens of one pass over the datasets, for intervals in epochs.
    """

    every: Duration
    training_tokens: int | None

    def is_due(self, state: RunState) -> bool:
        """Whether the last step crossed a multiple of the interval."""
        return is_due(self.every, state.before, state.progress, self.training_tokens)
