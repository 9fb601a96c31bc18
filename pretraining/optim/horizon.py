"""The horizon of a learning-rate schedule: the lengths in the settings, converted to steps of this run."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pretraining.config.plugins import SCHEDULES, USER_DEFINED
from pretraining.config.training import ScheduleConfig, parse_point
from pretraining.durations import Duration, TokenSchedule, resolve_warmup_steps
from pretraining.errors import ConfigError
from pretraining.text import count_of

ANNEALING_FROM = "annealing_from"
"""Key in checkpoints: the step at which the annealing stage began."""
DECAY_SHARE = Fraction(1, 5)
"""Default share of the run for the decay, enough for most of the gain (Hägele et al. 2024)."""


@dataclass(frozen=True)
class Horizon:
    """Lengths of a schedule in optimizer steps.

    The update after `warmup_steps` is the first at the peak. The last of `total_steps` has the smallest learning rate,
    `min_lr_ratio` of the peak.

    Attributes:
        decay_steps: updates below the peak at the end of the run.
        decay_shape: a name of `DECAYS`.
        decay_power: exponent of the polynomial shape.
        points: (step, share of the peak), in ascending order of steps.
    """

    warmup_steps: int
    total_steps: int
    min_lr_ratio: float
    decay_steps: int = 0
    decay_shape: str = "linear"
    decay_power: float = 1.0
    points: tuple[tuple[int, float], ...] = ()


def resolve_horizon(
    schedule: ScheduleConfig,
    num_steps: Duration,
    token_schedule: TokenSchedule,
    training_tokens: int | None,
    annealing_from: int = 0,
) -> Horizon:
    """Convert a schedule's lengths to steps of this run.

    Args:
        num_steps: length of the run.
        token_schedule: tokens of each step.
        training_tokens: tokens of one pass over the datasets; None for endless data.
        annealing_from: step at which the annealing stage began.

    Raises:
        ConfigError: the parts are longer than the run, points are out of order, or a length is in epochs of endless
            data.
    """
    total = num_steps.to_steps(token_schedule, training_tokens)
    if schedule.training_stage == "annealing":
        return Horizon(0, total, min_lr_ratio=0.0, decay_steps=max(0, total - 1 - annealing_from))
    row, warmup = SCHEDULES.get(schedule.schedule, USER_DEFINED), 0
    if "warmup_steps" in row.options:
        warmup = resolve_warmup_steps(schedule.warmup_steps, num_steps, token_schedule, training_tokens)
    return Horizon(
        warmup,
        total,
        schedule.min_lr_ratio,
        decay_steps=_decay_steps(schedule, warmup, total, token_schedule, training_tokens),
        decay_shape=row.decay_shape or schedule.decay_shape or "1-sqrt",
        decay_power=schedule.decay_power if schedule.decay_power is not None else 1.0,
        points=_points(schedule, total, token_schedule, training_tokens),
    )


def _decay_steps(
    schedule: ScheduleConfig, warmup: int, total: int, token_schedule: TokenSchedule, training_tokens: int | None
) -> int:
    """Return the steps of the decay, which are counted with the current tokens per step."""
    room, row = total - warmup, SCHEDULES.get(schedule.schedule, USER_DEFINED)
    if "stable_steps" not in row.options:  # the decay begins at once, if there is one
        return room - 1 if "min_lr_ratio" in row.options else 0
    name = "stable_steps" if schedule.decay_steps is None else "decay_steps"
    length = schedule.stable_steps if schedule.decay_steps is None else schedule.decay_steps
    if length is None:
        return min(int(DECAY_SHARE * total), room)
    now = TokenSchedule.steady(token_schedule.tokens_per_step)
    steps = length.part_of(total, now, training_tokens)
    if steps > room:
        raise ConfigError(
            f"warm-up ({warmup} steps) and --{name}={length} ({steps} steps) are longer than the run of {total} "
            "steps: shorten one, or increase --num_steps"
        )
    return steps if name == "decay_steps" else room - steps


def describe_schedule(schedule: ScheduleConfig, horizon: Horizon) -> str:
    """Return one line that describes the learning rate over a run."""
    name, row = schedule.schedule, SCHEDULES.get(schedule.schedule)
    if schedule.training_stage == "annealing":
        begin = horizon.total_steps - 1 - horizon.decay_steps
        return f"annealing: from the peak at step {begin} straight to 0 at step {horizon.total_steps}"
    if horizon.points:
        return f"{name}: " + ", ".join(f"{share:g} of the peak at step {step}" for step, share in horizon.points)
    line = f"{name}: {count_of(horizon.total_steps, 'step')}, warm-up over the first {horizon.warmup_steps}"
    if row is not None and "stable_steps" in row.options:
        line += f", decay over the last {horizon.decay_steps} ({horizon.decay_shape})"
    has_end = row is not None and "min_lr_ratio" in row.options
    return f"{line}, down to {horizon.min_lr_ratio:g} of the peak" if has_end else line


def _points(
    schedule: ScheduleConfig, total: int, token_schedule: TokenSchedule, training_tokens: int | None
) -> tuple[tuple[int, float], ...]:
    points = [
        (place.part_of(total, token_schedule, training_tokens), share)
        for place, share in map(parse_point, schedule.schedule_points)
    ]
    steps = [step for step, _ in points]
    if steps != sorted(set(steps)):
        raise ConfigError(
            f"--schedule_points={','.join(schedule.schedule_points)} are at steps {', '.join(map(str, steps))}: give "
            "them in ascending order"
        )
    return tuple(points)
