"""How far a run is."""

from __future__ import annotations

from dataclasses import dataclass, field

from pretraining.config.durations import Progress


@dataclass
class TrainState:
    """Counts of a run; the same on every rank at every step.

    Attributes:
        total_steps: length of the run.
        stop_step: where this invocation ends, at most `total_steps`.
        tokens_per_step: tokens that a step adds.
        progress, before: now, and before the last step.
    """

    total_steps: int
    stop_step: int
    tokens_per_step: int
    progress: Progress
    before: Progress = field(init=False)

    def __post_init__(self) -> None:
        """Nothing has been stepped yet."""
        self.before = self.progress

    @property
    def step(self) -> int:
        """Updates done, skipped ones included."""
        return self.progress.steps

    @property
    def finished(self) -> bool:
        """Whether the whole run is done."""
        return self.step >= self.total_steps

    @property
    def stopping(self) -> bool:
        """Whether this invocation is done."""
        return self.step >= self.stop_step

    def advance(self, seconds: float) -> None:
        """Count a step; `seconds` is the clock that all ranks agree on."""
        self.before = self.progress
        self.progress = Progress(self.step + 1, self.progress.tokens + self.tokens_per_step, seconds)
