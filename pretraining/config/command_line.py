"""The way from words of the command line to a checked configuration.

    words         --learning_rate=3e-4, --optimizer.learning_rate 3e-4, learning_rate=3e-4, --use-dummy-dataset,
                  --nomixed_precision, a path at the beginning
    assignments   an ordered list, `read_words`; `assign` makes one from Python's values
                  with the assignments of the recipes that they name in front: `read_recipes`
    settings      `resolve_config`

Defaults < recipes, left to right < command line, whose last word for a setting counts. The rules over several settings
are checked last.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import COMMAND_LINE, IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader
from pretraining.config.fields import setting, settings_of
from pretraining.config.recipes import RECIPE_SUFFIXES, RUN_CONFIG_FILE, read_recipe
from pretraining.config.rules import find_problems, resolve_run_folder
from pretraining.config.run_recipe import continue_run
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError, PretrainError, Problem
from pretraining.files import exists, is_address, is_file, is_folder

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLAG = re.compile("--|-[a-zA-Z]")


@dataclass(frozen=True)
class RecipeNames:
    """Names of recipes."""

    recipe: tuple[str, ...] = setting((), "comma list of recipes, read left to right")


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """A configuration, and what it was made of.

    Attributes:
        chosen: the assignment behind each setting that is not left at its default, by name.
    """

    config: T
    chosen: Mapping[str, Assignment]


def load_train_config(words: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read the settings of a training run from words of the command line and values by name."""
    given = [*read_words(TrainConfig, words), *assign(settings or {})]
    return resolve_config(TrainConfig, read_recipes(given)).config


# Words


def read_words(root: type, words: Sequence[str]) -> list[Assignment]:
    """Return the assignments of a command line, without those whose setting a later one gives by this or another name.

    A flag without `=` takes the next word unless that is a flag, too. Bare paths at the beginning are for the settings
    item as `first_word` and `second_word`, or else a recipe. Any other word without `=` becomes an assignment
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


# Recipes and settings


def read_recipes(given: Sequence[Assignment]) -> list[Assignment]:
    """Return the assignments of the recipes that assignments name, left to right, then the others, which win.

    Raises:
        ConfigError: every recipe that cannot be read.
    """
    names, words = recipe_names(given)
    assignments, problems = list[Assignment](), list[str]()
    for name in names:
        try:
            assignments += read_recipe(name)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return [*assignments, *words]


def recipe_names(given: Sequence[Assignment]) -> tuple[tuple[str, ...], list[Assignment]]:
    """Return the recipes that assignments name, and the other assignments.

    Raises:
        ConfigError: the list of recipes is malformed, or given twice.
    """
    reader, rest = Reader(RecipeNames), list[Assignment]()
    named = list[Assignment]()
    for word in given:
        (named if word.section_and_name[1] in RECIPE_NAMES else rest).append(word)
    reader.read([_as_list_of_recipes(word) for word in named])
    if reader.problems:
        raise ConfigError(reader.problems)
    return reader.values.get("recipe", ()), rest


def _as_list_of_recipes(given: Assignment) -> Assignment:
    """Rename `config` to `recipe`; an existing path with a comma becomes a list of one."""
    is_path = isinstance(given.raw, str) and "," in given.raw and exists(Path(given.raw))
    return replace(given, name=RECIPE_NAMES[0], raw=[str(given.raw)] if is_path else given.raw)


def resolve_config(root: type[T], given: Sequence[Assignment], *, continues_runs: bool = False) -> ResolvedConfig[T]:
    """Read assignments into a dataclass of settings, and check that the settings fit each other.

    Args:
        root: dataclass of the settings.
        given: later sources win.
        continues_runs: whether a run's config.yaml is that run, in its folder (`continue_run`), and not settings alone.

    Raises:
        ConfigError: every problem found in assignments and rules.
    """
    reader = read_given(root, given)
    for recipe in dict.fromkeys(assignment.source for assignment in given) if continues_runs else ():
        continue_run(reader, recipe)  # type: ignore[arg-type]
    config, problems = reader.build(), list[str | Problem](reader.problems)
    if config is not None:
        config = resolve_run_folder(config, reader.chosen)
        problems += [_with_places(problem, reader.chosen) for problem in find_problems(config, reader.unreadable)]
    if config is None or problems:
        raise ConfigError(problems)
    return ResolvedConfig(config, reader.chosen)


def read_given(root: type[T], given: Sequence[Assignment]) -> Reader[T]:
    """Return the settings that assignments give, without checks of rules."""
    reader = Reader(root)
    reader.read(given)
    on_command_line = {assignment.section_and_name[1] for assignment in given if assignment.source == COMMAND_LINE}
    if "data_path" in on_command_line and "use_dummy_dataset" not in on_command_line:
        for read in (reader.values, reader.chosen):  # a data path replaces the recipe's generated data
            read.pop("use_dummy_dataset", None)
    return reader


def _with_places(problem: Problem, chosen: Mapping[str, Assignment]) -> Problem:
    """Add to a problem the places in recipes that its settings come from."""
    places = _places(problem.names, chosen)
    return problem._replace(text=f"{problem.text} ({places})") if places else problem


@contextmanager
def naming_places(chosen: Mapping[str, Assignment]) -> Iterator[None]:
    """Add to errors of a `with` block the places in recipes that the settings in them come from."""
    try:
        yield
    except PretrainError as error:
        if places := _places(error.settings, chosen):
            error.args = (f"{error} ({places})",)
        raise


def _places(names: Collection[str], chosen: Mapping[str, Assignment]) -> str:
    places = [given.where for name, given in chosen.items() if name in names and given.source != COMMAND_LINE]
    return "; ".join(dict.fromkeys(places))
