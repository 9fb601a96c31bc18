"""Durations: amounts of training or of time, as users write them, in steps of a run.

    "5Btok", "2ep", "1000", "30min"  --Duration.parse-->  Duration
    Duration + tokens of each step (TokenSchedule)  --to_steps, once-->  steps of the run

Arithmetic is exact: an amount is the decimal number that was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from pretraining.errors import ConfigError

UNITS = ("steps", "tokens", "epochs", "seconds")
PERCENT = "percent"
"""Percent of the run, a unit only for lengths of its parts."""

MULTIPLIERS = {"K": 10**3, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

# Spellings of units, with canonical unit and factor. "m" is missing: it could mean a minute or a million.
_WRITTEN_UNITS = {
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **dict.fromkeys(("tok", "token", "tokens"), ("tokens", 1)),
    **dict.fromkeys(("ep", "epoch", "epochs"), ("epochs", 1)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
    "%": (PERCENT, 1),
}

_FORMS = {
    "steps": "1000 (steps)",
    "tokens": "5_000_000tok or 5Btok (k, M, B, T multiply)",
    "epochs": "2ep (epochs)",
    "seconds": "90s, 30min, 2h or 23h30min",
}
"""Examples for errors, by unit."""

# More than any run needs; a slip such as 1e999999999 would fill the memory.
LARGEST_AMOUNT = 10**18
NUMBER = r"[+-]?(?:\d[\d_]{0,99}(?:\.[\d_]{0,99})?|\.\d[\d_]{0,99})(?:[eE][+-]?\d{1,3})?"
_CLOCK = re.compile(r"\s*(?:(\d{1,4})-)?(\d{1,6}):([0-5]\d)(?::([0-5]\d))?\s*", re.ASCII)
_AMOUNT = re.compile(rf"\s*({NUMBER})([a-zA-Z\s%]*)", re.ASCII)


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a decimal number (`1_000`, `1e6`, `.5`); None for other text."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*", text, re.ASCII)
    return Fraction(match[1].replace("_", "")) if match else None


@dataclass(frozen=True)
class Duration:
    """An amount of training or of time.

    Attributes:
        amount: from 0 to 10^18; a whole number of steps or tokens, any number of epochs or seconds.
        unit: "steps", "tokens", "epochs", "seconds" or "percent".

    Raises:
        ConfigError: the unit is unknown, or the amount does not fit it.
    """

    amount: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in (*UNITS, PERCENT):
            raise ConfigError(f"{self.unit!r} is not a unit of a duration: use one of {', '.join(UNITS)}")
        if not 0 <= self.amount <= LARGEST_AMOUNT:  # false for nan, too
            raise ConfigError(f"{self.amount} {self.unit} are out of range: give 0 to 10^18")
        if self.unit in ("steps", "tokens"):
            if self.amount != int(self.amount):
                raise ConfigError(f"{self.amount} {self.unit} are not a whole number")
            object.__setattr__(self, "amount", int(self.amount))

    @classmethod
    def parse(cls, text: str | int, units: Iterable[str] = UNITS) -> Duration:
        """Parse a duration: 1000 (steps), 5_000_000tok, 5Btok, 2ep, 90s, 30min, 2h, 23h30min or 23:30:00.

        Args:
            units: those that the error names.

        Raises:
            ConfigError: the text has none of these forms.
        """
        clock = _CLOCK.fullmatch(str(text))
        if clock is not None and (clock[1] or clock[4]):  # SLURM's [days-]hours:minutes:seconds; 24:00 may be minutes
            days, hours, minutes, seconds = (int(group or 0) for group in clock.groups())
            return cls(((days * 24 + hours) * 60 + minutes) * 60 + seconds, "seconds")
        parts = [_read_amount(number, "".join(unit.split())) for number, unit in _AMOUNT.findall(str(text))]
        exact, written = sum((amount for amount, _ in parts), Fraction(0)), {name for _, name in parts}
        is_one = len(parts) == 1 or (len(parts) in (2, 3) and written == {"seconds"})
        if not is_one or None in written or _AMOUNT.sub("", str(text)) or not 0 <= exact <= LARGEST_AMOUNT:
            forms = ", ".join(_FORMS[unit] for unit in units if unit in _FORMS)
            raise ConfigError(f"{str(text)!r} is not a duration: write {forms}; at most 10^18")
        return cls(int(exact) if exact.denominator == 1 else float(exact), str(parts[0][1]))

    def __str__(self) -> str:
        """Return text that `parse` reads back equal."""
        if self.unit == "steps":
            return str(self.amount)
        if self.unit == "seconds" and self.amount and self.amount % 60 == 0:
            hours, minutes = divmod(int(self.amount) // 60, 60)
            return (f"{hours}h" if hours else "") + (f"{minutes}min" if minutes else "")
        if self.unit != "tokens":
            shortest = int(self.amount) if self.amount == int(self.amount) else self.amount
            return f"{shortest!r}" + {"epochs": "ep", PERCENT: "%", "seconds": "s"}[self.unit]
        for suffix, multiplier in reversed(MULTIPLIERS.items()):
            if self.amount and self.amount % multiplier == 0:
                return f"{int(self.amount) // multiplier}{suffix}tok"
        return f"{self.amount}tok"

    def to_steps(self, schedule: TokenSchedule, training_tokens: int | None) -> int:
        """Return the fewest optimizer steps that reach this length.

        Args:
            schedule: tokens of the steps.
            training_tokens: tokens in one pass over the datasets; None for endless data.

        Raises:
            ConfigError: epochs without `training_tokens`, or a unit that is no amount of training.
        """
        if self.unit == "steps":
            return int(self.amount)
        if self.unit in (PERCENT, "seconds"):
            raise ConfigError(f"{self} is not a length: give steps (1000), tokens (5Btok) or epochs (2ep)")
        return schedule.steps_to(self._in_tokens(training_tokens))

    def part_of(self, total_steps: int, schedule: TokenSchedule, training_tokens: int | None) -> int:
        """Return the steps of a part of a run: a percentage of `total_steps`, rounded down, or as `to_steps`."""
        if self.unit == PERCENT:
            return int(_as_written(self.amount) * total_steps / 100)
        return self.to_steps(schedule, training_tokens)

    def _in_tokens(self, training_tokens: int | None) -> Fraction:
        if self.unit == "tokens":
            return Fraction(int(self.amount))
        if training_tokens is None:
            raise ConfigError(
                f"{self} counts passes over a dataset, and this run's data is endless: give steps (1000) or tokens "
                "(5Btok)"
            )
        return _as_written(self.amount) * training_tokens


@dataclass(frozen=True)
class TokenSchedule:
    """Tokens seen at each step of a run, in segments with a constant number of tokens per step.

    `segments` are (first step, tokens seen before it, tokens per step), in order, without gaps. The first one starts at
    step 0 with no tokens seen; the last one has no end.
    """

    segments: tuple[tuple[int, int, int], ...]

    @classmethod
    def steady(cls, tokens_per_step: int) -> TokenSchedule:
        """Return a schedule with the same number of tokens in every step."""
        return cls(((0, 0, tokens_per_step),))

    @classmethod
    def of_phases(cls, phases: Iterable[tuple[int, int]]) -> TokenSchedule:
        """Return the schedule of phases, each given by first step and tokens per step."""
        segments: list[tuple[int, int, int]] = []
        for first_step, tokens_per_step in phases:
            before = cls(tuple(segments)).tokens_at(first_step) if segments else 0
            segments = [segment for segment in segments if segment[0] < first_step]  # a phase may have no step
            segments.append((first_step, before, tokens_per_step))
        return cls(tuple(segments))

    @property
    def first(self) -> TokenSchedule:
        """The schedule with the first segment only, as if the batch had never changed."""
        return TokenSchedule(self.segments[:1])

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step in the last segment."""
        return self.segments[-1][2]

    def tokens_at(self, step: int) -> int:
        """Return the tokens seen after a number of steps."""
        first_step, tokens, tokens_per_step = max(segment for segment in self.segments if segment[0] <= step)
        return tokens + (step - first_step) * tokens_per_step

    def steps_to(self, tokens: Fraction) -> int:
        """Return the fewest steps that reach a number of tokens."""
        # The last segment that starts with fewer tokens reaches the number.
        started = [segment for segment in self.segments if segment[1] < tokens] or [self.segments[0]]
        first_step, before, tokens_per_step = started[-1]
        return first_step + math.ceil((tokens - before) / tokens_per_step)


def resolve_warmup_steps(
    warmup: Duration | None, length: Duration, schedule: TokenSchedule, training_tokens: int | None
) -> int:
    """Return the steps of the linear warm-up.

    The default is a twentieth of the run, at most 2000 steps. It counts with the first batch size of the run, so that a
    later change of the batch does not change the warm-up.

    Raises:
        ConfigError: the warm-up is longer than the run, or in epochs without `training_tokens`.
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
    """Return exact amount and canonical unit: 5 Mtok is 5,000,000 tokens; None for an unknown unit.

    20B has no unit on purpose: 20 billion steps would be a mistake.
    """
    multiplier = 1
    if unit.lower() not in _WRITTEN_UNITS and unit[0] in MULTIPLIERS:
        multiplier, unit = MULTIPLIERS[unit[0]], unit[1:] or "?"
    name, factor = _WRITTEN_UNITS.get(unit.lower(), (None, 0))
    return Fraction(number.replace("_", "")) * multiplier * factor, name


def _as_written(amount: float) -> Fraction:
    """Return the decimal number that a float prints as: 0.1 is 1/10, not 0.1000000000000000055."""
    return Fraction(repr(amount))
