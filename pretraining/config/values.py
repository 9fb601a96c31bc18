"""Parsing, checking and formatting of one setting's value.

Flags and recipes give raw text (a list of texts for a recipe's list, None for its null). `parse_value` returns the
typed value, `limit_problem` checks a value, and `format_value` returns text that parses back equal.
"""

from __future__ import annotations

import difflib
import operator
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt

from pretraining.config.fields import Setting
from pretraining.config.plugins import PLUGIN_PATH, join_brackets
from pretraining.durations import LARGEST_AMOUNT, PERCENT, Duration, parse_number
from pretraining.errors import ConfigError
from pretraining.files import address_problem, exists, is_address, parse_address
from pretraining.text import parse_bytes

Raw = str | list[str] | None

LARGEST_INTEGER = 2**63
"""All integers of a run fit 64 bits, seeds included."""

NONE_WORDS = ("none", "null", "")
BOOL_WORDS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
_NOUNS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Duration: "a duration"}

# Address of an object store or server. As a path it would be a folder `s3:`; pathlib merges the two slashes.
_ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.-]*:/", re.IGNORECASE)

_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)

_REMOVED_CHOICES = {"jsonl": " (logs/metrics.jsonl in the run's folder is always written)"}
"""Remedies for choices that were removed."""

# Each limit with its words in help, its test, and its words in an error.
_LIMITS = (
    (Ge, "at least", operator.ge, "the smallest value is"),
    (Gt, "above", operator.gt, "it must be above"),
    (Le, "at most", operator.le, "the largest value is"),
    (Lt, "below", operator.lt, "it must be below"),
)


def parse_value(setting: Setting, raw: Raw, *, is_typed: bool = True) -> Any:
    """Parse a setting's text; `raw` is a list or None only in a recipe.

    Args:
        is_typed: whether a user of this project wrote the text, in which `$NAME` in a path is a variable.

    Raises:
        ValueError: the text has the wrong type or exceeds the limits; the message completes "<flag>=<text>: ".
    """
    value: Any
    if setting.many:
        items = split_list(raw)
        items = join_brackets(items) if setting.name.endswith("_options") else items
        value = tuple(_parse_one(setting, text, is_typed) for text in items)
    elif setting.optional and (raw is None or str(raw).strip().lower() in NONE_WORDS):
        value = setting.typed_none if isinstance(raw, str) and raw.strip() else None
    elif isinstance(raw, str):
        value = _parse_one(setting, raw, is_typed)
    else:
        raise ValueError(f"{_NOUNS[setting.base]} is needed, not {'null' if raw is None else 'a list'}")
    problem = limit_problem(setting, value)
    if problem:
        raise ValueError(problem)
    return value


def split_list(raw: Raw) -> list[str]:
    """Split a comma list: `a,b`, `[a, b]` or `(a,b)`, items bare or quoted; "", `[]` and `none` are empty.

    Raises:
        ValueError: an item is empty.
    """
    if isinstance(raw, list):
        return raw
    text = (raw or "").strip()
    if text and text[0] + text[-1] in ("[]", "()"):
        text = text[1:-1].strip()
    elif text.lower() in NONE_WORDS:
        text = ""
    items = [item.strip() for item in text.split(",")] if text else []
    items = [item[1:-1] if len(item) > 1 and item[0] == item[-1] and item[0] in "'\"" else item for item in items]
    if "" in items:
        raise ValueError("there is an empty item in the comma list")
    return items


def parse_ranges(
    flag: str, texts: Sequence[str], smallest: int, largest: int = LARGEST_AMOUNT
) -> list[tuple[int, int]]:
    """Return the first and last number of each range `A-B` or `A`, both included.

    Raises:
        ConfigError: a range is malformed or out of bounds.
    """
    try:
        ranges = [(int(begin), int(end or begin)) for begin, _, end in (text.partition("-") for text in texts)]
    except ValueError:
        ranges = [(0, -1)]
    if not all(smallest <= first <= last <= largest for first, last in ranges):
        raise ConfigError(
            f"--{flag}={','.join(texts)}: write first and last of each range, counted from {smallest}, as in "
            "10-12,1000-1002"
        )
    return ranges


def expand_home(path: str | Path, *, is_typed: bool = True) -> str:
    """Expand `~` or `~name` at the beginning of a path, and `$NAME` and `${NAME}` anywhere in it.

    Shells expand neither in a recipe, nor `~` after a flag's `=`. A path that exists as written is literal.

    Args:
        is_typed: False = expand `~` alone, as in a path that was expanded when it was recorded.

    Raises:
        ValueError: the home folder does not exist, or the variable is not set.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111  # pathlib would turn `./a` and `a/` into `a`
    if is_typed and _VARIABLE.search(expanded) and not exists(Path(expanded)):
        expanded = os.path.expanduser(_VARIABLE.sub(_variable, expanded))  # noqa: PTH111
    if expanded.startswith("~"):
        raise ValueError(f"there is no home folder {expanded.partition('/')[0]}: write the path in full")
    return expanded


def _variable(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in os.environ:
        raise ValueError(f"the variable {name} is not set: export it, or write the path in full")
    return os.environ[name]


def limit_problem(setting: Setting, value: Any) -> str | None:
    """Return the problem of a value, parsed or of an untrusted file, with type or limits; None if it is valid."""
    if value is None and setting.optional:
        return None
    items = value if setting.many else (value,)
    return next(filter(None, (_item_problem(setting, item) for item in items)), None)


def format_value(value: Any) -> str:
    """Return a value as text, which `parse_value` reads back equal."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(format_value(item) for item in value)
    return str(value)


def describe_type(setting: Setting) -> str:
    """Describe the allowed values: "whole number, at least 1, or none", "one of ddp, zero2"."""
    if setting.choices:
        text = ("any of " if setting.many else "one of ") * (len(setting.choices) > 1) + ", ".join(setting.choices)
        text += ", or package.module:Name" if setting.pluggable else ""
    elif setting.in_bytes:
        text = "bytes, as 500MB, 5GB or 2GiB"
    elif setting.base is Duration:
        text = " or ".join(setting.units)
    else:
        text = _NOUNS[setting.base].removeprefix("a ") + ("s, comma list" if setting.many else "")
    text += "".join(f", {word} {setting.limits[kind]:g}" for kind, word, _, _ in _LIMITS if kind in setting.limits)
    return f"{text}, or none" if setting.optional else text


def did_you_mean(name: str, known: Iterable[str], question: str) -> str:
    """Return a question such as "did you mean {}?" with the known name closest to a misspelt one; "" if none is close.

    Initials also match: lr, wd, bs.
    """
    candidates = list(known)
    initials = [
        candidate for candidate in candidates if "".join(word[:1] for word in candidate.split("_")) == name.lower()
    ]
    close = difflib.get_close_matches(name.lower(), candidates, n=1) + initials
    return question.format(close[0]) if close else ""


def _parse_one(setting: Setting, text: str, is_typed: bool) -> Any:
    if setting.choices:
        return _canonical_choice(setting, text.strip())
    if setting.base is Duration:
        try:
            return Duration.parse(text, setting.units)
        except ConfigError as error:
            part = ". A part of the run is written 3%" if PERCENT in setting.units else ""
            raise ValueError(f"{error}{part}") from error
    if setting.base is bool:
        if (word := text.strip().lower()) not in BOOL_WORDS:
            raise ValueError("true or false is needed (also yes, no, on, off, 1, 0)")
        return BOOL_WORDS[word]
    if setting.base is str:
        path = expand_home(text, is_typed=is_typed) if setting.is_path else text
        is_in_store = setting.may_be_address and is_address(path) and not path.lower().startswith("file://")
        return parse_address(path).text if is_in_store else path  # the endpoint of the environment is recorded
    percent = parse_number(text.strip().removesuffix("%")) if text.strip().endswith("%") else None
    if percent is not None and 1 in (setting.limits.get(Le), setting.limits.get(Lt)):  # a fraction
        return float(percent / 100)
    number = parse_number(text)
    if number is None or (setting.base is int and number.denominator != 1):
        raise ValueError(f"{_NOUNS[setting.base]} is needed, as 5_000 or 5e3")
    # A number beyond the range of floats becomes infinite, which `limit_problem` refuses.
    return int(number) if setting.base is int else float(text.replace("_", ""))


def _canonical_choice(setting: Setting, text: str) -> str:
    """Return the canonical spelling of a choice that is written in any case, with dashes or underscores."""
    word = text.lower().replace("-", "_")
    word = setting.aliases.get(word, word)
    return {choice.replace("-", "_"): choice for choice in setting.choices}.get(word, text)


def _item_problem(setting: Setting, value: Any) -> str | None:
    accepted: Any = (int, float) if setting.base is float else setting.base
    if not isinstance(value, accepted) or isinstance(value, bool) != (setting.base is bool):
        return f"{_NOUNS[setting.base]} is needed"
    if setting.base is Duration and value.unit not in setting.units:
        return f"{value.unit} are not allowed here, give {' or '.join(setting.units)}"
    if setting.is_path and is_address(value) and (problem := address_problem(value)) is not None:
        return f"the address {problem}"
    if setting.in_bytes:
        try:
            parse_bytes(value)
        except ValueError as error:
            return str(error)
    looks_like_address = setting.is_path and _ADDRESS.match(value) is not None
    if looks_like_address and not (setting.may_be_address and is_address(value)):
        if setting.may_be_address:
            return "an address begins with s3://, gs://, abfss:// or file://"
        return "this setting takes no address: copy the files to a disk first (aws s3 sync), or give a mounted path"
    if setting.choices and value not in setting.choices and not (setting.pluggable and PLUGIN_PATH.fullmatch(value)):
        hint = _REMOVED_CHOICES.get(value) or did_you_mean(value, setting.choices, " (did you mean {}?)")
        user_defined = ", or a user-defined package.module:Name" if setting.pluggable else ""
        return f"not known{hint}, use one of {', '.join(setting.choices)}{user_defined}"
    if setting.base is int and abs(value) >= LARGEST_INTEGER:
        return "it must be below 2^63"
    if setting.base is float and not abs(value) <= sys.float_info.max:
        return "a finite number is needed"
    for kind, _, holds, words in _LIMITS:
        if kind in setting.limits and not holds(value, setting.limits[kind]):
            return f"{words} {setting.limits[kind]:g}"
    return None
