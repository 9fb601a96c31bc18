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
        stop: the request, agreed by all ranks, to end ahead of `stop_step`; 0 = none (train/preemption.py).
    """

    total_steps: int
    stop_step: int
    tokens_per_step: int
    progress: Progress
    before: Progress = field(init=False)
    stop: int = field(init=False, default=0)

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
    def preempted(self) -> bool:
        """Whether this invocation is to end now, done or not."""
        return self.stop != 0

    @property
    def stopping(self) -> bool:
        """Whether this invocation is done."""
        return self.preempted or self.step >= self.stop_step

    def advance(self, seconds: float, stop: int = 0) -> None:
        """Count a step; `seconds` is the clock that all ranks agree on, `stop` their request to end."""
        self.before = self.progress
        self.progress = Progress(self.step + 1, self.progress.tokens + self.tokens_per_step, seconds)
        self.heed(stop)

    def heed(self, stop: int) -> None:
        """Take note of an agreed request to end; 0 changes nothing, and a second one does not change the reason."""
        self.stop = self.stop or stop
