"""How far a run is, how long it goes, and when things are due.

    "5Btok", "2ep", "1000", "30min"  --Duration.parse-->  Duration
    Duration + tokens of each step (TokenSchedule)  --to_steps, once-->  steps of the run
    Interval + TrainState after each step  --is_due-->  report, evaluate, save?

Whether an interval is due depends on where the run stands, never on when the last event was: intervals do not drift,
and a resumed run keeps their rhythm. Arithmetic is exact: an amount counts as the decimal number that was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from pretraining.errors import ConfigError

UNITS = ("steps", "tokens", "epochs", "seconds")
PERCENT = "percent"
"""Of the run: a unit of those lengths alone that are parts of one."""

MULTIPLIERS = {"K": 10**3, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

# How a unit may be written, and how many of the canonical unit it is. "m" is left out: it could mean a minute or a
# million.
_WRITTEN_UNITS = {
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **dict.fromkeys(("tok", "token", "tokens"), ("tokens", 1)),
    **dict.fromkeys(("ep", "epoch", "epochs"), ("epochs", 1)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
    "%": (PERCENT, 1),
}

# More than any run could mean, and small enough that a slip such as 1e999999999 cannot fill the memory.
LARGEST_AMOUNT = 10**18
_NUMBER = r"[+-]?(?:\d[\d_]{0,99}(?:\.[\d_]{0,99})?|\.\d[\d_]{0,99})(?:[eE][+-]?\d{1,3})?"
_AMOUNT = re.compile(rf"\s*({_NUMBER})([a-zA-Z\s%]*)", re.ASCII)


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a written decimal number (`1_000`, `1e6`, `.5`), or None."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*", text, re.ASCII)
    return Fraction(match[1].replace("_", "")) if match else None


@dataclass(frozen=True)
class Duration:
    """An amount of training or of time.

    Attributes:
        amount: from 0 to 10^18; a whole number of steps or tokens, any number of epochs or seconds.
        unit: "steps", "tokens", "epochs", "seconds" or "percent".

    Raises:
        ConfigError: the unit is unknown, or the amount is not one of it.
    """

    amount: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in (*UNITS, PERCENT):
            raise ConfigError(f"{self.unit!r} is no unit of a duration: use one of {', '.join(UNITS)}")
        if not 0 <= self.amount <= LARGEST_AMOUNT:  # false for nan, too
            raise ConfigError(f"{self.amount} {self.unit} are no duration: give from 0 to 10^18")
        if self.unit in ("steps", "tokens"):
            if self.amount != int(self.amount):
                raise ConfigError(f"{self.unit} come whole, not as {self.amount}")
            object.__setattr__(self, "amount", int(self.amount))

    @classmethod
    def parse(cls, text: str | int) -> Duration:
        """Read a duration as users write it: 1000 (steps), 5_000_000tok, 5Btok, 2ep, 90s, 30min, 2h or 23h30min.

        Raises:
            ConfigError: the text is none of these.
        """
        parts = [_read_amount(number, "".join(unit.split())) for number, unit in _AMOUNT.findall(str(text))]
        exact, units = sum((amount for amount, _ in parts), Fraction(0)), {name for _, name in parts}
        is_one = len(parts) == 1 or (len(parts) in (2, 3) and units == {"seconds"})
        if not is_one or None in units or _AMOUNT.sub("", str(text)) or not 0 <= exact <= LARGEST_AMOUNT:
            raise ConfigError(
                f"{str(text)!r} is no duration: write 1000 (steps), 5_000_000tok or 5Btok (k, M, B, T multiply), "
                "2ep (epochs), 90s, 30min, 2h or 23h30min; at most 10^18 of each"
            )
        return cls(int(exact) if exact.denominator == 1 else float(exact), str(parts[0][1]))

    def __str__(self) -> str:
        """Return the text that `parse` reads back to an equal duration."""
        if self.unit == "steps":
            return str(self.amount)
        if self.unit == "seconds" and self.amount and self.amount % 60 == 0:
            hours, minutes = divmod(int(self.amount) // 60, 60)
            return (f"{hours}h" if hours else "") + (f"{minutes}min" if minutes else "")
        if self.unit != "tokens":
            return _decimal(self.amount) + {"epochs": "ep", PERCENT: "%", "seconds": "s"}[self.unit]
        for suffix, multiplier in reversed(MULTIPLIERS.items()):
            if self.amount and self.amount % multiplier == 0:
                return f"{int(self.amount) // multiplier}{suffix}tok"
        return f"{self.amount}tok"

    def to_steps(self, schedule: TokenSchedule, training_tokens: int | None) -> int:
        """Return the number of optimizer steps that first reach this length.

        Args:
            schedule: tokens of the steps.
            training_tokens: tokens of one pass over the datasets; None for data without an end.

        Raises:
            ConfigError: epochs without `training_tokens`, or seconds, which are no amount of training.
        """
        if self.unit == "steps":
            return int(self.amount)
        if self.unit in (PERCENT, "seconds"):
            raise ConfigError(f"{self} is no length: give steps (1000), tokens (5Btok) or epochs (2ep)")
        return schedule.steps_to(self._in_tokens(training_tokens))

    def part_of(self, total_steps: int, schedule: TokenSchedule, training_tokens: int | None) -> int:
        """Return the steps of a part of a run: of a share of `total_steps`, rounded down, or as `to_steps`."""
        if self.unit == PERCENT:
            return int(_as_written(self.amount) * total_steps / 100)
        return self.to_steps(schedule, training_tokens)

    def _in_tokens(self, training_tokens: int | None) -> Fraction:
        if self.unit == "tokens":
            return Fraction(int(self.amount))
        if training_tokens is None:
            raise ConfigError(
                f"{self} counts passes over a dataset, and this run has none: give steps (1000) or tokens (5Btok)"
            )
        return _as_written(self.amount) * training_tokens


@dataclass(frozen=True)
class TokenSchedule:
    """How many tokens a run has seen at which step; the tokens of a step may have changed on the way.

    `segments` are (first step, tokens seen before it, tokens a step), in order, without gaps. The first one begins at
    step 0 with no tokens seen; the last one has no end.
    """

    segments: tuple[tuple[int, int, int], ...]

    @classmethod
    def steady(cls, tokens_per_step: int) -> TokenSchedule:
        """Return the schedule of a run whose steps all have as many tokens."""
        return cls(((0, 0, tokens_per_step),))

    @classmethod
    def of_phases(cls, phases: Iterable[tuple[int, int]]) -> TokenSchedule:
        """Return the schedule of a run's phases, each given by its first step and the tokens of a step."""
        segments: list[tuple[int, int, int]] = []
        for first_step, tokens_per_step in phases:
            before = cls(tuple(segments)).tokens_at(first_step) if segments else 0
            segments.append((first_step, before, tokens_per_step))
        return cls(tuple(segments))

    @property
    def first(self) -> TokenSchedule:
        """Return the schedule that the run began with."""
        return TokenSchedule(self.segments[:1])

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step now."""
        return self.segments[-1][2]

    def tokens_at(self, step: int) -> int:
        """Return the tokens seen after a number of steps."""
        first_step, tokens, tokens_per_step = max(segment for segment in self.segments if segment[0] <= step)
        return tokens + (step - first_step) * tokens_per_step

    def steps_to(self, tokens: Fraction) -> int:
        """Return the fewest steps that reach a number of tokens."""
        # The last of the segments that begin with fewer reaches them.
        begun = [segment for segment in self.segments if segment[1] < tokens] or [self.segments[0]]
        first_step, before, tokens_per_step = begun[-1]
        return first_step + math.ceil((tokens - before) / tokens_per_step)


@dataclass(frozen=True)
class Progress:
    """How far a run is; `seconds` are of training, on the clock that decides for all ranks."""

    steps: int
    tokens: int
    seconds: float = 0.0


@dataclass
class TrainState:
    """Where a run stands; the same on every rank after every step.

    Attributes:
        total_steps: length of the run.
        stop_step: where this invocation ends, at most `total_steps`.
        tokens_per_step: tokens that a step adds.
        progress, before: after and ahead of the last step.
        early_end: why the run is over before its last step; empty = it is not.
        stop: request to end ahead of `stop_step` that all ranks agreed on; 0 = none (train/preemption.py).
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
        """Return the updates done, skipped ones included."""
        return self.progress.steps

    @property
    def finished(self) -> bool:
        """Return whether the whole run is done, or is over early."""
        return self.step >= self.total_steps or bool(self.early_end)

    @property
    def preempted(self) -> bool:
        """Return whether this invocation ends now, done or not."""
        return self.stop != 0

    @property
    def stopping(self) -> bool:
        """Return whether this invocation is done."""
        return self.preempted or self.finished or self.step >= self.stop_step

    def advance(self, seconds: float, stop: int = 0) -> None:
        """Count a step; `seconds` is the clock that all ranks agree on, `stop` their request to end."""
        self.before = self.progress
        self.progress = Progress(self.step + 1, self.progress.tokens + self.tokens_per_step, seconds)
        self.request_stop(stop)

    def end_early(self, reason: str) -> None:
        """Make this step the run's last one; the same on every rank."""
        self.early_end = reason

    def request_stop(self, stop: int) -> None:
        """Keep the first agreed request to end; 0 requests nothing."""
        self.stop = self.stop or stop


@dataclass(frozen=True)
class Interval:
    """How often something happens, 0 = never; `training_tokens` are those of one pass over the datasets, for epochs."""

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


def resolve_warmup_steps(
    warmup: Duration | None, length: Duration, schedule: TokenSchedule, training_tokens: int | None
) -> int:
    """Return the steps of the linear warm-up.

    Without a setting it is a twentieth of the run, at most 2000 steps. Where the batch changed, that of the run as it
    began: the warm-up is over by then, or goes on as it was.

    Raises:
        ConfigError: the warm-up is longer than the run, or is in epochs without `training_tokens`.
    """
    num_steps = length.to_steps(schedule, training_tokens)
    if warmup is None:
        return min(length.to_steps(schedule.first, training_tokens) // 20, 2000, num_steps)
    steps = warmup.part_of(num_steps, schedule, training_tokens)
    if steps > num_steps:
        raise ConfigError(
            f"--warmup_steps={warmup} is {steps} steps of {schedule.tokens_per_step} tokens, more than the {num_steps} "
            "of the run: shorten it or lengthen --num_steps"
        )
    return steps


def _read_amount(number: str, unit: str) -> tuple[Fraction, str | None]:
    """Return the exact amount in its canonical unit, and that unit: 5 Mtok are 5,000,000 tokens; None = no unit.

    20B is none: of steps it would be far too many.
    """
    multiplier = 1
    if unit.lower() not in _WRITTEN_UNITS and unit[0] in MULTIPLIERS:
        multiplier, unit = MULTIPLIERS[unit[0]], unit[1:] or "?"
    name, factor = _WRITTEN_UNITS.get(unit.lower(), (None, 0))
    return Fraction(number.replace("_", "")) * multiplier * factor, name


def _as_written(amount: float) -> Fraction:
    """Return the decimal that a float prints as: 0.1 is a tenth, not 0.1000000000000000055."""
    return Fraction(repr(amount))


def _decimal(amount: float) -> str:
    """Print a number in the shortest form that reads back equal."""
    return str(int(amount)) if amount == int(amount) else repr(amount)
