"""Learning-rate schedules: pure functions of the step, without state, so a resume cannot shift them.

A schedule is a function (step, peak, horizon) -> learning rate of the update that follows `step` finished ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from pretraining.config.plugins import SCHEDULES, load_plugin, plugin_errors
from pretraining.config.training import ScheduleConfig
from pretraining.durations import Duration, TokenSchedule
from pretraining.errors import ConfigError
from pretraining.optim.horizon import ANNEALING_FROM, Horizon, resolve_horizon
from pretraining.optim.optimizer import PEAK, set_rate


class Schedule(Protocol):
    """A schedule that `--schedule` names."""

    def __call__(self, step: int, peak: float, horizon: Horizon) -> float:
        """Return the learning rate of the update that follows `step` finished ones."""
        ...


def warmup_and_decay(step: int, peak: float, horizon: Horizon) -> float:
    """Return the rate of a linear warm-up, updates at the peak, and a decay to `min_lr_ratio` of the peak.

    Without updates at the peak this is, with shape "cosine", the schedule of Loshchilov and Hutter (2017); with them,
    that of Hu et al. (2024, MiniCPM, section 4). Without a decay, the rate stays at the peak.
    """
    if step < horizon.warmup_steps:
        return peak * ((step + 1) / (horizon.warmup_steps + 1))
    last = horizon.total_steps - 1
    begin = max(last - horizon.decay_steps, horizon.warmup_steps)
    done = min(1.0, (step - begin) / (last - begin)) if step > begin and last > begin else 0.0
    left = DECAYS[horizon.decay_shape](done, horizon.decay_power)
    return peak * (horizon.min_lr_ratio + (1.0 - horizon.min_lr_ratio) * left)


def piecewise_linear(step: int, peak: float, horizon: Horizon) -> float:
    """Return the rate on straight lines between points; it is constant before the first and after the last."""
    steps = [point for point, _ in horizon.points]
    after = bisect.bisect_right(steps, step)
    if after in (0, len(steps)):
        return peak * horizon.points[min(after, len(steps) - 1)][1]
    (begin, low), (end, high) = horizon.points[after - 1 : after + 1]
    return peak * (low + (high - low) * (step - begin) / (end - begin))


DECAYS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda done, power: 1 - done,
    "polynomial": lambda done, power: (1 - done) ** power,
    "cosine": lambda done, power: 0.5 * (1 + math.cos(math.pi * done)),
    "1-sqrt": lambda done, power: 1 - math.sqrt(done),
}
"""Functions (share of the decay done, power) -> share of the way down that is left; 1-sqrt is Hägele et al. (2024)."""


class LearningRate:
    """The schedule of an optimizer's learning rates, which scales each group's own peak.

    Its state in checkpoints is the step at which the annealing stage began. The plan of a resumed run reads it, before
    the run is built.

    Args:
        annealing_from: that step; None in another stage.

    Raises:
        ConfigError: a user-defined schedule cannot be imported, or fails for the first or the last step.
    """

    def __init__(self, name: str, horizon: Horizon, annealing_from: int | None = None) -> None:
        self.horizon = horizon
        self._annealing_from = annealing_from
        self._name = name
        path = SCHEDULES[name].path if name in SCHEDULES else name
        self._schedule: Schedule = load_plugin("schedule", path)
        for step in {0, horizon.total_steps - 1}:
            self.at(step, 1.0)

    def at(self, step: int, peak: float) -> float:
        """Return the learning rate of the update that follows `step` finished ones.

        Raises:
            ConfigError: the schedule fails, or returns a number that is negative or not finite.
        """
        with plugin_errors("schedule", self._name):
            rate = self._schedule(step, peak, self.horizon)
        if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
            raise ConfigError(f"--schedule={self._name} returns {rate!r} for step {step}: return a number >= 0")
        return rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {} if self._annealing_from is None else {ANNEALING_FROM: self._annealing_from}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the rate was made with the state (`plan_run`)."""

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set every group's rate for the update after `step` finished ones; return the first group's rate."""
        rates = [self.at(step, group[PEAK]) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)
        return float(rates[0])


def build_learning_rate(
    schedule: ScheduleConfig,
    num_steps: Duration,
    token_schedule: TokenSchedule,
    training_tokens: int | None,
    annealing_from: int = 0,
) -> LearningRate:
    """Make the learning rate of a run; arguments and errors as `resolve_horizon`."""
    horizon = resolve_horizon(schedule, num_steps, token_schedule, training_tokens, annealing_from)
    if schedule.training_stage == "annealing":
        return LearningRate("linear", horizon, annealing_from)
    return LearningRate(schedule.schedule, horizon)
