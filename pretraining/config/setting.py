"""How a setting is declared: a dataclass field with its help and limits."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any

RUN_LENGTH = ("steps", "tokens", "epochs")
INTERVAL = ("steps", "tokens", "epochs", "seconds")


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    units: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its help and the limits that parsing enforces.

    Args:
        default: the value without a flag or a recipe; left out, one must be given.
        help: what the flag does, in a sentence.
        units: of a `Duration`: which of steps, tokens, epochs, seconds are meaningful.
        choices: the only values allowed, in canonical spelling: lower case, underscores (any case and dashes are
            accepted).
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        below: a number that the value must stay under.
    """
    limits = {"units": units, "choices": choices, "minimum": minimum, "maximum": maximum, "below": below}
    return field(default=default, metadata={"help": help, **limits})
