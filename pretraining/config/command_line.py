"""Words of the command line, and values of Python, as assignments: one ordered list.

words     --learning_rate=3e-4, --optimizer.learning_rate 3e-4, learning_rate=3e-4, --use-dummy-dataset,
          --nomixed_precision, a path at the beginning
values    learning_rate=3e-4 in Python
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader
from pretraining.config.fields import settings_of
from pretraining.config.recipe_files import RECIPE_SUFFIXES, RUN_CONFIG_FILE
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError
from pretraining.files import exists, is_address, is_file, is_folder

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLAG = re.compile("--|-[a-zA-Z]")


def read_words(root: type, words: Sequence[str]) -> list[Assignment]:
    """Return the assignments of a command line, without those whose setting a later one gives by this or another name.

    A flag without `=` takes the next word unless that is a flag, too. Bare paths at the beginning are for the settings
    that declare `first_word` and `second_word`, or else a recipe. Any other word without `=` becomes an assignment
    without a name, which `Reader` refuses.

    Args:
        root: dataclass of the settings.

    Raises:
        ConfigError: a comma list is malformed, or a folder holds no run.
    """
    reader: Reader[Any] = Reader(root)
    rest, first, given = list(words), list[str](), list[Assignment]()
    while rest:
        word = rest.pop(0)
        if _FLAG.match(word):
            given.append(_read_flag(word, rest, reader))
        elif is_bare_path(word) and all(assignment.flag.startswith("--") for assignment in given):
            first.append(word)
        else:
            given.append(_read_positional(word))
    given = [word for word in given if word.section_and_name[1] not in IGNORED_NAMES]
    last = {_setting_of(word, reader): word for word in given}
    kept = [word for word in given if not (name := _setting_of(word, reader)) or last[name] is word]
    return [*_name_first_words(root, first), *kept]


def _read_flag(word: str, rest: list[str], reader: Reader[Any]) -> Assignment:
    """Return the assignment of a flag; `rest`, the words behind it, lose its value."""
    name, equals, text = word.lstrip("-").partition("=")
    if not name:
        return _read_positional(word)
    if equals or (rest and not _FLAG.match(rest[0])):
        text = text if equals else rest.pop(0)
        return Assignment(name, text, where=f"--{name}={text}", flag=f"--{name}")
    on = Assignment(name, "True", where=f"--{name}=True", flag=f"--{name}", valueless=True)
    name = name.removeprefix("no").lstrip("-_")  # --nomixed_precision, --no-mixed-precision
    off = Assignment(name, "False", where=f"--{name}=False", flag=f"--{name}", valueless=True)
    return off if reader.find(on) is None and reader.find(off) is not None else on


def _read_positional(word: str) -> Assignment:
    name, _, text = word.partition("=")
    name = name.strip().lstrip("-")
    if name and not is_bare_path(word):
        return Assignment(name, text, where=word, flag=name)
    return Assignment("", word, where=repr(word), flag=word)


def _setting_of(given: Assignment, reader: Reader[Any]) -> str:
    """Return the setting that an assignment gives; "" if it gives none that is known."""
    if given.section_and_name[1] in RECIPE_NAMES:
        return RECIPE_NAMES[0]
    setting = reader.find(given)
    return "" if setting is None else setting.name


def _name_first_words(root: type, words: Sequence[str]) -> list[Assignment]:
    """Return the assignments of bare paths at the beginning.

    If their setting is a list, each word is one item if the path exists (folders of a sweep have commas in their
    names), else a comma list.
    """
    settings, reads_recipes = settings_of(root).values(), issubclass(root, TrainConfig)
    names = [item.name for item in settings if item.first_word] + [item.name for item in settings if item.second_word]
    if words and any(item.first_word and item.many for item in settings):
        try:
            items = [item for word in words for item in ([word] if exists(Path(word)) else split_list(word))]
        except ValueError as error:
            raise ConfigError(f"{' '.join(words)}: {error}") from None
        return [Assignment(names[0], items, where=" ".join(words), flag=names[0])]
    if words and root is TrainConfig and is_folder(Path(words[0])):
        words = [_config_of_run(words[0]), *words[1:]]
    if words and reads_recipes and (words[0].endswith(RECIPE_SUFFIXES) or is_file(Path(words[0]))):
        names = [RECIPE_NAMES[0]]
    named = [
        Assignment(name, word, where=f"{name}={word}", flag=name) for name, word in zip(names, words, strict=False)
    ]
    return [*named, *map(_read_positional, words[len(named) :])]


def _config_of_run(folder: str) -> str:
    """Return the recipe of the run in a folder; raise a ConfigError if there is none."""
    path = Path(folder, RUN_CONFIG_FILE)
    if not exists(path):
        raise ConfigError(
            f"{folder} holds no {RUN_CONFIG_FILE}, so no start has written into it yet: name the folder of a run, or "
            f"give the settings and --ckpt_save_path={folder}"
        )
    return str(path)


def is_bare_path(word: str) -> bool:
    """Return whether a word of the command line is a path, not `name=value`."""
    return bool(word) and ("=" not in word or is_address(word.partition("=")[0]) or exists(Path(word)))


def assign(settings: Mapping[str, Any]) -> list[Assignment]:
    """Return the assignments of Python's values by name; any value that has a text form, None for none."""
    return [_assign(name, value) for name, value in settings.items()]


def _assign(name: str, value: Any) -> Assignment:
    is_list = isinstance(value, (list, tuple))
    raw: Raw = [format_value(item) for item in value] if is_list else format_value(value)
    text = format_value(tuple(value)) if is_list else format_value(value)
    return Assignment(name, raw, where=f"--{name}={text}", flag=f"--{name}")
