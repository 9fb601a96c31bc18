"""Learning-rate schedules: pure functions of the step, so there is nothing to save and nothing drifts at a resume.

A schedule is a function (step, peak, horizon) -> learning rate of the update that follows `step` finished ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from pretraining.config.plugins import SCHEDULES, load_plugin
from pretraining.errors import ConfigError
from pretraining.optim.optimizer import PEAK


@dataclass(frozen=True)
class Horizon:
    """What a schedule is stretched over, in optimizer steps.

    The update after `warmup_steps` is the first at the peak. The last of `total_steps` has the smallest learning rate,
    `min_lr_ratio` of the peak.
    """

    warmup_steps: int
    total_steps: int
    min_lr_ratio: float


class Schedule(Protocol):
    """What `--schedule` names."""

    def __call__(self, step: int, peak: float, horizon: Horizon) -> float:
        """Returns the learning rate of the update that follows `step` finished ones."""
        ...


def cosine(step: int, peak: float, horizon: Horizon) -> float:
    """Linear warm-up to the peak, then half a cosine down to `min_lr_ratio` of it (Loshchilov and Hutter, 2017)."""
    if step < horizon.warmup_steps:
        return peak * (step + 1) / (horizon.warmup_steps + 1)
    decay_steps = horizon.total_steps - 1 - horizon.warmup_steps
    fraction = min(1.0, (step - horizon.warmup_steps) / decay_steps) if decay_steps > 0 else 0.0
    curve = 0.5 * (1.0 + math.cos(math.pi * fraction))
    return peak * (horizon.min_lr_ratio + (1.0 - horizon.min_lr_ratio) * curve)


class LearningRate:
    """Sets the learning rates of an optimizer by the setting `schedule`, each group's from its own peak.

    Raises:
        ConfigError: a user's own schedule cannot be found, or gives no learning rate for the first or the last step.
    """

    def __init__(self, name: str, horizon: Horizon) -> None:
        self._name = name
        self._horizon = horizon
        self._schedule: Schedule = load_plugin("schedule", SCHEDULES.get(name, name))
        for step in {0, horizon.total_steps - 1}:
            self.at(step, 1.0)

    def at(self, step: int, peak: float) -> float:
        """Returns the learning rate of the update that follows `step` finished ones.

        Raises:
            ConfigError: the schedule does not give a finite number from 0 on.
        """
        rate = self._schedule(step, peak, self._horizon)
        if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
            raise ConfigError(f"--schedule={self._name} gives {rate!r} for step {step}: a learning rate is from 0 on")
        return rate

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Sets every group's rate for the update after `step` finished ones; returns that of the first group."""
        for group in optimizer.param_groups:
            group["lr"] = self.at(step, group[PEAK])
        rate: float = optimizer.param_groups[0]["lr"]
        return rate
