"""The command line: from what fire hands over to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

Settings come from defaults < recipes, left to right < command line; then the rules over several settings are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader, setting_named
from pretraining.config.fields import settings_of
from pretraining.config.recipes import RECIPE_SUFFIXES, Recipe, Translator, read_recipe
from pretraining.config.rules import find_problems, settle_run_folder
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, parse_bool, split_list
from pretraining.errors import ConfigError
from pretraining.files import exists

T = TypeVar("T")
log = logging.getLogger(__name__)

ACCEPTS = {
    "accept_llama": "where a recipe of another system describes another model, take a Llama of the same shape",
    "accept_unknown": "leave out what is not understood in a recipe of another system",
}
"""Switches that say what may be left out of recipes of other systems."""
ABOUT_RECIPES = (*RECIPE_NAMES, *ACCEPTS)
"""Names on a command line that are no settings: which recipes are read, and how."""


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """A configuration, and by name the assignment that each setting comes from; the others keep their defaults."""

    config: T
    chosen: Mapping[str, Assignment]


def load_train_config(
    overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None, translate: Translator | None = None
) -> TrainConfig:
    """Reads the settings of a training run; see `parse_config`."""
    return parse_config(TrainConfig, overrides, flags, translate=translate)


def parse_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
    translate: Translator | None = None,
) -> T:
    """Reads a command line into a dataclass of settings, as `resolve_config` does."""
    return resolve_config(root, overrides, flags, beneath, translate).config


def resolve_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
    translate: Translator | None = None,
) -> ResolvedConfig[T]:
    """Reads a command line into a dataclass of settings, and checks that they fit each other.

    Where the settings are those of training, the flag `recipe` (or `config`, or a path as the first word) names
    recipes, a comma list; what became of the settings of another system, in a file or under its dotted names, is
    logged.

    Args:
        root: the dataclass.
        overrides: positional `name=value`; of the same name the last one counts. The first may be a value alone, of a
            setting that is declared as `first_word`; of one that is a list, several may.
        flags: text by flag name, as fire hands it over; "True", "False" or None stand for a flag without a value. From
            Python, any value that can be written as text.
        beneath: settings that come before those of recipes, such as a checkpoint's.
        translate: reads recipes and words of other systems; None = there are none.

    Raises:
        ConfigError: carries every problem found, of recipes, flags and rules.
    """
    reads_recipes = issubclass(root, TrainConfig)
    assignments, problems = read_arguments(*name_first_words(root, overrides, flags or {}), reads_recipes)
    found = _read_recipes(assignments, translate) if reads_recipes else ([], assignments, [])
    recipes, given, problems_of_recipes = found
    names = [name for recipe in recipes for name in recipe.names]
    reader = Reader(root, also_known=[*ABOUT_RECIPES, *names] if reads_recipes else ())
    for source in (beneath, *_sources(recipes), given):
        reader.read(source)
    on_command_line = {assignment.section_and_name[1] for assignment in given}
    if "data_path" in on_command_line and "use_dummy_dataset" not in on_command_line and reads_recipes:
        reader.forget("use_dummy_dataset")  # a recipe's: the command line's data wins over it
    config = reader.build()
    problems += problems_of_recipes + reader.problems
    # Without its recipe a run looks incomplete in ways that it is not.
    if config is not None and not problems_of_recipes:
        config = settle_run_folder(config, reader.chosen)
        problems += find_problems(config, reader.unreadable)
    if config is None or problems:
        raise ConfigError(problems)
    for recipe in recipes:
        if recipe.system:
            lines = "\n".join(recipe.table)
            log.info("%s is read as settings of another system (%s):\n%s", recipe.name, recipe.system, lines)
    return ResolvedConfig(config, reader.chosen)


def value_on_command_line(
    name: str, overrides: Sequence[str], flags: Mapping[str, Any], translate: Translator | None = None
) -> Any:
    """Returns what the command line alone sets a setting of training to; None without a readable value."""
    assignments = [
        given for given in read_arguments(overrides, flags)[0] if given.section_and_name[1] not in RECIPE_NAMES
    ]
    reader = Reader(TrainConfig)
    reader.read(_read_recipes(assignments, translate)[1])
    return reader.values.get(name)


def value_given(
    name: str, overrides: Sequence[str], flags: Mapping[str, Any], translate: Translator | None = None
) -> Any:
    """Returns what recipes and the command line set a setting of training to; None without a readable value."""
    recipes, given, _ = _read_recipes(read_arguments(_name_first_word(TrainConfig, overrides), flags)[0], translate)
    reader = Reader(TrainConfig)
    for source in (*_sources(recipes), given):
        reader.read(source)
    return reader.values.get(name)


def _sources(recipes: Sequence[Recipe]) -> Iterator[Sequence[Assignment]]:
    """Yields the settings of recipes, later ones over earlier ones; defaults of other systems come first."""
    yield from (recipe.defaults for recipe in recipes)
    yield from (recipe.assignments for recipe in recipes)


def _settings_among(assignments: Sequence[Assignment]) -> list[Assignment]:
    return [given for given in assignments if given.section_and_name[1] not in ABOUT_RECIPES]


def _name_first_word(root: type, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides, the first of them with its name where it is a path alone."""
    first, *others = overrides or [""]
    names = [setting.name for setting in settings_of(root).values() if setting.first_word]
    if issubclass(root, TrainConfig) and not names and first.endswith(RECIPE_SUFFIXES):
        names = [RECIPE_NAMES[0]]
    return [f"{names[0]}={first}", *others] if names and _is_path(first) else list(overrides)


def name_first_words(
    root: type, overrides: Sequence[str], flags: Mapping[str, Any]
) -> tuple[list[str], Mapping[str, Any]]:
    """Returns overrides and flags, the first words that are paths alone with the name of the setting that they are of.

    Of a list, a word is an item if such a path is there, else a comma list: folders of a sweep have commas.

    Raises:
        ConfigError: a word is no comma list, or a flag is given for the same list.
    """
    lists = [setting.name for setting in settings_of(root).values() if setting.first_word and setting.many]
    if not lists:
        return _name_first_word(root, overrides), flags
    words = list(takewhile(_is_path, overrides))
    try:
        items = [item for word in words for item in ([word] if exists(Path(word)) else split_list(word))]
    except ValueError as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from None
    if words and lists[0] in flags:
        raise ConfigError(f"two values for {lists[0]}, {' '.join(words)} and --{lists[0]}={flags[lists[0]]}: keep one")
    return list(overrides[len(words) :]), {lists[0]: items, **flags} if words else flags


def _is_path(word: str) -> bool:
    return bool(word) and ("=" not in word or exists(Path(word)))


def read_arguments(
    overrides: Sequence[str], flags: Mapping[str, Any], reads_recipes: bool = True
) -> tuple[list[Assignment], list[str]]:
    """Returns the assignments of a command line, and a problem for each argument that assigns nothing.

    Args:
        reads_recipes: whether the command takes a recipe, so that a path alone may mean one.
    """
    problems = []
    positional = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if name.startswith(("+", "~")) or (equals and "@" in name):
            problems.append(_instead_of_operator(name, override))
        elif equals:
            name = name.strip().lstrip("-")
            positional[name] = Assignment(name, text, where=override, flag=name)
        else:
            means_recipe = reads_recipes and override.endswith(RECIPE_SUFFIXES)
            hint = f"--recipe={override}" if means_recipe else "name=value or --name=value"
            if reads_recipes and exists(main_file := Path(override) / "config.yaml"):
                hint = f"--recipe={main_file}, the main file of this folder of groups"
            problems.append(f"{override!r} sets nothing: write {hint}")
    given = [_read_flag(name, value) for name, value in flags.items() if name.replace("-", "_") not in IGNORED_NAMES]
    return [*positional.values(), *given], problems


def _instead_of_operator(name: str, override: str) -> str:
    """Says what to write in place of an argument that adds, deletes or moves a part of a composed config."""
    if name.startswith("~"):
        return f"{override}: nothing is taken out of a recipe; write {name[1:]}=null, or the value that it should have"
    if "@" in name:
        group = name.lstrip("+").partition("@")[0]
        return f"{override}: a group's file lands under the group's name; write {group}=…"
    return f"{override}: what a recipe lacks is added without a sign; write {override.lstrip('+')}"


def _read_flag(name: str, value: Any) -> Assignment:
    """Returns the assignment of one flag.

    fire turns a flag without a value into "True", and one that starts with "no" into "False" under the rest of its
    name, which of `--no-mixed_precision` is `_mixed_precision`.
    """
    if isinstance(value, (list, tuple)):
        raw: Raw = [format_value(item) for item in value]
        return Assignment(name, raw, where=f"--{name}={format_value(tuple(value))}", flag=f"--{name}")
    text = "True" if value is None else format_value(value)
    if text == "False":
        name = name.lstrip("-_")
    return Assignment(name, text, where=f"--{name}={text}", flag=f"--{name}", valueless=text in ("True", "False"))


def _read_recipes(
    assignments: Sequence[Assignment], translate: Translator | None
) -> tuple[list[Recipe], list[Assignment], list[str]]:
    """Returns the recipes that a command line names, left to right, its settings, and what is wrong with recipes.

    Arguments that a recipe of another system reads are settings as it says. Those that are no settings, and that no
    recipe has read, may be words of another system: one more recipe, above the others.
    """
    settings = _settings_among(assignments)
    named = [given for given in assignments if given.section_and_name[1] in RECIPE_NAMES]
    try:
        names, accepts = _names_of_recipes(named), [name for name in ACCEPTS if _is_on(name, assignments)]
    except ConfigError as error:
        return [], settings, list(error.problems)
    readers: list[Callable[[Mapping[str, Raw]], Recipe | None]] = [
        lambda arguments, name=name: read_recipe(name, translate, arguments, accepts)  # type: ignore[misc]
        for name in names
    ]
    if translate is not None:
        readers.append(lambda arguments: None if problems else _read_words(arguments, translate, accepts))
    recipes: list[Recipe] = []
    from_arguments: list[Assignment] = []
    problems: list[str] = []
    for read in readers:
        try:
            recipe = read({given.name: given.raw for given in settings})
        except ConfigError as error:
            problems += error.problems
            continue
        if recipe is not None:
            recipes.append(recipe)
            from_arguments += recipe.from_arguments
            problems += _twice(settings, recipe.used)
            settings = [given for given in settings if given.name not in recipe.used]
    if problems and len(names) > 1 and isinstance(named[0].raw, str):
        problems[-1] += ". (A comma parts recipes. A path with a comma is given alone, or the file renamed)"
    if problems:  # what could not be read might have taken arguments that are none of ours
        settings = [given for given in settings if setting_named(given.name) is not None]
    if accepts and not problems and not any(recipe.system for recipe in recipes):
        problems.append(f"--{accepts[0]} is about recipes of other systems, and none is given")
    return recipes, [*from_arguments, *settings], problems


def _read_words(arguments: Mapping[str, Raw], translate: Translator, accepts: Collection[str]) -> Recipe | None:
    """Returns what arguments that are no settings mean as words of another system; None where there are no such."""
    is_foreign = any(setting_named(name) is None for name in arguments)
    return translate(None, "the command line", arguments, accepts) if is_foreign else None


def _twice(settings: Sequence[Assignment], names: Collection[str]) -> list[str]:
    """Returns a problem for each of the names that is given two values."""
    first: dict[str, Assignment] = {}
    problems = []
    for given in settings:
        before = first.setdefault(given.name, given)
        if given.name in names and before.raw != given.raw:
            problems.append(f"two values for {given.name}, {before.where} and {given.where}: keep one")
    return problems


def _names_of_recipes(named: Sequence[Assignment]) -> list[str]:
    if not named:
        return []
    if len(named) > 1:
        given = " and ".join(assignment.where for assignment in named)
        raise ConfigError(f"recipes are named twice, {given}: write one comma list, read left to right")
    if named[0].valueless:
        raise ConfigError(f"{named[0].flag} is given no value: write {named[0].flag}=…")
    raw = named[0].raw
    try:
        return [raw] if isinstance(raw, str) and _is_one_path(raw) else split_list(raw)
    except ValueError as error:
        raise ConfigError(f"{named[0].where}: {error}") from error


def _is_on(switch: str, assignments: Sequence[Assignment]) -> bool:
    """Returns the value of a switch; a ConfigError where it is neither true nor false."""
    given = [assignment for assignment in assignments if assignment.section_and_name[1] == switch]
    try:
        return bool(given) and parse_bool(str(given[-1].raw))
    except ValueError as error:
        raise ConfigError(f"{given[-1].where}: {error}") from None


def _is_one_path(text: str) -> bool:
    """Whether a text with commas is the path of a recipe all the same, because a file is there."""
    return "," in text and text.endswith(RECIPE_SUFFIXES) and exists(Path(text))
