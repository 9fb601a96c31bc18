"""What the main thread of this process is doing, for the threads that watch over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Pulse:
    """Written by the main thread, read by others.

    Attributes:
        doing: "starting" until the first step, then "training", "data" (waiting for it), "evaluation", "checkpoint".
        step: steps that the run has done.
        warm: whether one of them was done since the start, so that everything is opened, restored and compiled.
        beats: grows with everything that gets done.
    """

    doing: str = "starting"
    step: int = 0
    warm: bool = False
    beats: int = 0

    def restart(self, step: int) -> None:
        """Begin, or begin again, from a step."""
        self.doing, self.step, self.warm = "starting", step, False
        self.beats += 1

    def turn_to(self, doing: str) -> None:
        """Begin with something else."""
        self.doing = doing
        self.beats += 1

    def watch(self, items: Iterable[T]) -> Iterator[T]:
        """The same items; each is a beat."""
        for item in items:
            self.beats += 1
            yield item

    def end_step(self, step: int) -> None:
        """Note that so many steps are done."""
        self.step, self.warm = step, True
        self.beats += 1
