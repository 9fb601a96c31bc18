"""One setting's value: from text, against its limits, and back to text.

Flags and recipes hand over raw text (a recipe's list as a list of texts, its null as None), so that one rule decides
what a value means wherever it stands. `parse_value` makes the typed value, `limit_problem` says what is wrong with one,
`format_value` writes it so that it parses back equal.
"""

from __future__ import annotations

import math
from typing import Any

from pretraining.config.fields import Setting
from pretraining.config.names import VALUE_ALIASES, nearest
from pretraining.errors import ConfigError
from pretraining.progress import UNITS, Duration, parse_number

Raw = str | list[str] | None

# Every integer of a run fits 64 bits; seeds, too.
LARGEST_INTEGER = 2**63

NONE_WORDS = ("none", "null", "")
_BOOL_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def parse_value(setting: Setting, raw: Raw) -> Any:
    """Return the value that a text stands for.

    Args:
        setting: what is asked for.
        raw: the text; a list of texts or None only from a recipe.

    Raises:
        ValueError: it is not of the setting's type or beyond its limits; the message completes "<flag>=<text>: ".
    """
    if setting.many:
        value: Any = tuple(_parse_one(setting, text) for text in split_list(raw))
    elif isinstance(raw, list):
        raise ValueError(f"{_NOUNS[setting.base]} is needed, not a list")
    elif setting.optional and (raw is None or raw.strip().lower() in NONE_WORDS):
        value = None
    elif raw is None:
        raise ValueError(f"{_NOUNS[setting.base]} is needed, not null")
    else:
        value = _parse_one(setting, raw)
    problem = limit_problem(setting, value)
    if problem:
        raise ValueError(problem)
    return value


def split_list(raw: Raw) -> list[str]:
    """Take a comma list apart: `a,b`, `[a, b]` or `(a,b)`, items bare or in quotes; nothing, `[]` and `none` are empty.

    Raises:
        ValueError: an item is empty.
    """
    if isinstance(raw, list):
        return raw
    text = (raw or "").strip()
    if text.lower() in NONE_WORDS:
        return []
    if text[0] + text[-1] in ("[]", "()"):
        text = text[1:-1].strip()
        if not text:
            return []
    items = [item.strip() for item in text.split(",")]
    items = [item[1:-1] if len(item) > 1 and item[0] == item[-1] and item[0] in "'\"" else item for item in items]
    if "" in items:
        raise ValueError("there is an empty item in the comma list")
    return items


def limit_problem(setting: Setting, value: Any) -> str | None:
    """Say what is wrong with a typed value by the type and the limits of its setting; None where nothing is.

    A parsed value has the right type by construction; one that was put into a dataclass in Python may not.
    """
    if setting.optional and value is None:
        return None
    if setting.many:
        if not isinstance(value, tuple):
            return "a tuple is needed"
        return next((problem for item in value if (problem := _item_problem(setting, item))), None)
    if setting.optional and isinstance(value, str) and value.strip().lower() in NONE_WORDS:
        return f"{value!r} reads as none: write None, or ./{value} for a path"
    return _item_problem(setting, value)


def format_value(value: Any) -> str:
    """Write a value as a flag would be: `parse_value` reads it back equal."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(format_value(item) for item in value)
    return str(value)


def describe_type(setting: Setting) -> str:
    """Say in a few words what may be given: "whole number, at least 1, or none", "one of ddp, zero2"."""
    if setting.choices:
        text = ("any of " if setting.many else "one of ") * (len(setting.choices) > 1) + ", ".join(setting.choices)
    elif setting.base is Duration:
        text = _or(setting.units or UNITS)
    elif setting.many:
        text = f"{_NOUNS[setting.base].removeprefix('a ')}s, comma list"
    else:
        text = _NOUNS[setting.base].removeprefix("a ")
    limits = (("at least", setting.minimum), ("at most", setting.maximum), ("below", setting.below))
    text += "".join(f", {word} {limit:g}" for word, limit in limits if limit is not None)
    return f"{text}, or none" if setting.optional else text


_NOUNS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Duration: "a duration"}


def _parse_one(setting: Setting, text: str) -> Any:
    """Parse one text by the base type."""
    if setting.base is str:
        return _parse_choice(setting, text) if setting.choices else text
    if setting.base is bool:
        if text.strip().lower() not in _BOOL_WORDS:
            raise ValueError("true or false is needed (also yes, no, on, off, 1, 0)")
        return _BOOL_WORDS[text.strip().lower()]
    if setting.base is int:
        number = parse_number(text)
        if number is None or number.denominator != 1:
            raise ValueError("a whole number is needed, as 5000, 5_000 or 5e3")
        return int(number)
    if setting.base is float:
        return _parse_float(text)
    try:
        return Duration.parse(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _parse_float(text: str) -> float:
    """Parse a number; one beyond the range of floats is refused rather than rounded to infinity."""
    if parse_number(text) is None:
        raise ValueError("a number is needed, as 0.1, 3e-4 or 5_000")
    value = float(text.replace("_", ""))
    if not math.isfinite(value):
        raise ValueError("a finite number is needed")
    return value


def _parse_choice(setting: Setting, text: str) -> str:
    """Bring one of the choices, in any case and with dashes or underscores, to its canonical spelling."""
    word = text.strip().lower().replace("-", "_")
    word = VALUE_ALIASES.get(setting.name, {}).get(word, word)
    if word not in setting.choices:
        close = nearest(word, setting.choices)
        hint = f" (did you mean {close}?)" if close else ""
        raise ValueError(f"not known{hint}, use one of {', '.join(setting.choices)}")
    return word


def _item_problem(setting: Setting, value: Any) -> str | None:
    """Check one value against type and limits."""
    if not _has_type(value, setting.base):
        hint = ", as Duration.parse makes it," if setting.base is Duration else ""
        return f"{_NOUNS[setting.base]}{hint} is needed"
    if setting.base is Duration and setting.units and value.unit not in setting.units:
        return f"{value.unit} mean nothing here, give {_or(setting.units)}"
    if setting.choices and value not in setting.choices:
        return f"not known, use one of {', '.join(setting.choices)}"
    return _number_problem(setting, value) if setting.base in (int, float) else None


def _has_type(value: Any, base: type) -> bool:
    """Return whether a value is of a setting's base type: whole numbers are numbers, true and false are not."""
    if base is bool or isinstance(value, bool):
        return base is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if base is float else base)


def _number_problem(setting: Setting, value: float) -> str | None:
    """Check a number against its limits."""
    if isinstance(value, int) and abs(value) >= LARGEST_INTEGER:
        return "it must be below 2^63"
    if not math.isfinite(value):
        return "a finite number is needed"
    if setting.minimum is not None and value < setting.minimum:
        return f"the smallest value is {setting.minimum:g}"
    if setting.maximum is not None and value > setting.maximum:
        return f"the largest value is {setting.maximum:g}"
    if setting.below is not None and value >= setting.below:
        return f"it must be below {setting.below:g}"
    return None


def _or(words: tuple[str, ...]) -> str:
    """Join words for a sentence: steps, tokens or epochs."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


# TODO(merge): was pretraining.config.values
# Ranges of whole numbers as users write them: A-B with both ends included, or A alone.


def parse_range(text: str, smallest: int) -> tuple[int, int]:
    """The first and the last number of a range.

    Args:
        text: A-B or A.
        smallest: that A may be.

    Raises:
        ValueError: it is no range.
    """
    begin, _, end = text.partition("-")
    first, last = int(begin), int(end or begin)
    if not smallest <= first <= last:
        raise ValueError(text)
    return first, last
