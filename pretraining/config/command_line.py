"""The command line: from what fire hands over to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

Settings come from defaults < recipes, left to right < command line; then the rules over several settings are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader, setting_named
from pretraining.config.fields import setting, settings_of
from pretraining.config.recipes import RECIPE_SUFFIXES, Recipe, Translator, read_recipe
from pretraining.config.rules import find_problems, settle_run_folder
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError
from pretraining.files import exists, is_address

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecipeChoice:
    """Which recipes are read, and what may be left out of those of other systems."""

    recipe: tuple[str, ...] = setting((), "comma list of recipes, read left to right")
    accept_llama: bool = setting(
        False, "where a recipe of another system describes another model, take a Llama of the same shape"
    )
    accept_unknown: bool = setting(False, "leave out what is not understood in a recipe of another system")


ABOUT_RECIPES = (*RECIPE_NAMES, *settings_of(RecipeChoice))
"""Names on a command line that are no settings."""


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """A configuration, and by name the assignment that each setting comes from; the others keep their defaults."""

    config: T
    chosen: Mapping[str, Assignment]


def load_train_config(
    overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None, translate: Translator | None = None
) -> TrainConfig:
    """Read the settings of a training run; see `parse_config`."""
    return parse_config(TrainConfig, overrides, flags, translate=translate)


def parse_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
    translate: Translator | None = None,
) -> T:
    """Read a command line into a dataclass of settings, as `resolve_config` does."""
    return resolve_config(root, overrides, flags, beneath, translate).config


def resolve_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
    translate: Translator | None = None,
) -> ResolvedConfig[T]:
    """Read a command line into a dataclass of settings, and checks that they fit each other.

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
    reader, recipes, has_recipes = _read(root, overrides, flags, beneath, translate)
    config, problems = reader.build(), reader.problems
    if config is not None and has_recipes:  # without its recipe a run looks incomplete in ways that it is not
        config = settle_run_folder(config, reader.chosen)
        problems += find_problems(config, reader.unreadable)
    if config is None or problems:
        raise ConfigError(problems)
    for recipe in recipes:
        if recipe.system:
            lines = "\n".join(recipe.table)
            log.info("%s is read as settings of another system (%s):\n%s", recipe.name, recipe.system, lines)
    return ResolvedConfig(config, reader.chosen)


def read_given(overrides: Sequence[str], flags: Mapping[str, Any], translate: Translator | None) -> Reader[TrainConfig]:
    """Return what recipes and the command line set of training, whatever else is wrong with them."""
    return _read(TrainConfig, overrides, flags, (), translate)[0]


def _read(
    root: type[T],
    overrides: Sequence[str],
    flags: Mapping[str, Any] | None,
    beneath: Sequence[Assignment],
    translate: Translator | None,
) -> tuple[Reader[T], list[Recipe], bool]:
    """Return the settings that are given, the recipes among their sources, and whether all of those could be read."""
    reads_recipes = issubclass(root, TrainConfig)
    assignments, problems = read_arguments(*name_first_words(root, overrides, flags or {}), reads_recipes)
    found = _read_recipes(assignments, translate) if reads_recipes else ([], assignments, [])
    recipes, given, problems_of_recipes = found
    names = [name for recipe in recipes for name in recipe.names]
    reader = Reader(root, also_known=[*ABOUT_RECIPES, *names] if reads_recipes else ())
    reader.problems += problems + problems_of_recipes
    defaults = [recipe.defaults for recipe in recipes]  # of other systems; every recipe wins over them
    for source in (beneath, *defaults, *(recipe.assignments for recipe in recipes), given):
        reader.read(source)
    on_command_line = {assignment.section_and_name[1] for assignment in given}
    if "data_path" in on_command_line and "use_dummy_dataset" not in on_command_line:
        for read in (reader.values, reader.chosen):  # a recipe's made-up data: the command line's data wins over it
            read.pop("use_dummy_dataset", None)
    return reader, recipes, not problems_of_recipes


def name_first_words(
    root: type, overrides: Sequence[str], flags: Mapping[str, Any]
) -> tuple[list[str], Mapping[str, Any]]:
    """Return overrides and flags, the first words that are paths alone with the name of the setting that they are of.

    That is one declared as `first_word`, else a recipe. Of a list, a word is an item if such a path is there, else a
    comma list: folders of a sweep have commas.

    Raises:
        ConfigError: a word is no comma list, or a flag is given for the same list.
    """
    first = next((setting for setting in settings_of(root).values() if setting.first_word), None)
    words = list(takewhile(_is_path, overrides))
    if first is None or not first.many:
        is_recipe = issubclass(root, TrainConfig) and bool(words) and words[0].endswith(RECIPE_SUFFIXES)
        name = first.name if first is not None else RECIPE_NAMES[0] if is_recipe else None
        return [f"{name}={words[0]}", *overrides[1:]] if words and name else list(overrides), flags
    try:
        items = [item for word in words for item in ([word] if exists(Path(word)) else split_list(word))]
    except ValueError as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from None
    if words and first.name in flags:
        raise ConfigError(f"two values for {first.name}, {' '.join(words)} and --{first.name}={flags[first.name]}")
    return list(overrides[len(words) :]), {first.name: items, **flags} if words else flags


def _is_path(word: str) -> bool:
    return bool(word) and ("=" not in word or is_address(word.partition("=")[0]) or exists(Path(word)))


def read_arguments(
    overrides: Sequence[str], flags: Mapping[str, Any], reads_recipes: bool = True
) -> tuple[list[Assignment], list[str]]:
    """Return the assignments of a command line, and a problem for each argument that assigns nothing.

    Args:
        reads_recipes: whether the command takes a recipe, so that a path alone may mean one.
    """
    problems = []
    positional = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals:
            name = name.strip().lstrip("-")
            positional[name] = Assignment(name, text, where=override, flag=name)
        else:
            is_recipe = reads_recipes and override.endswith(RECIPE_SUFFIXES)
            hint = f"--recipe={override}" if is_recipe else "name=value or --name=value"
            problems.append(f"{override!r} sets nothing: write {hint}")
    given = [_read_flag(name, value) for name, value in flags.items() if name.replace("-", "_") not in IGNORED_NAMES]
    return [*positional.values(), *given], problems


def _read_flag(name: str, value: Any) -> Assignment:
    """Return the assignment of one flag.

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
    """Return the recipes that a command line names, left to right, its settings, and what is wrong with recipes.

    Arguments that a recipe of another system reads are settings as it says. Those that are no settings, and that no
    recipe has read, may be words of another system: one more recipe, above the others.
    """
    settings = [given for given in assignments if given.section_and_name[1] not in ABOUT_RECIPES]
    reader = Reader(RecipeChoice)
    reader.read([_one_name(given) for given in assignments if given.section_and_name[1] in ABOUT_RECIPES])
    if reader.problems:
        return [], settings, reader.problems
    names = reader.values.get("recipe", ())
    accepts = [name for name, value in reader.values.items() if value is True]
    recipes: list[Recipe] = []
    from_arguments: list[Assignment] = []
    problems: list[str] = []
    for name in (*names, None):  # None: the words that are left
        arguments = {given.name: given.raw for given in settings}
        recipe: Recipe | None
        try:
            if name is not None:
                recipe = read_recipe(name, translate, arguments, accepts)
            else:
                is_foreign = not problems and any(setting_named(argument) is None for argument in arguments)
                recipe = translate(None, "the command line", arguments, accepts) if is_foreign and translate else None
        except ConfigError as error:
            problems += error.problems
            continue
        if recipe is not None:
            recipes.append(recipe)
            from_arguments += recipe.from_arguments
            settings = [given for given in settings if given.name not in recipe.used]
    if accepts and not problems and not any(recipe.system for recipe in recipes):
        problems.append(f"--{accepts[0]} is about recipes of other systems, and none is given")
    if problems:  # what could not be read might have taken arguments that are none of ours
        settings = [given for given in settings if setting_named(given.name) is not None]
    return recipes, [*from_arguments, *settings], problems


def _one_name(given: Assignment) -> Assignment:
    """Return an assignment of recipes under their first name, a path with a comma that is there as a list of one."""
    if given.section_and_name[1] not in RECIPE_NAMES:
        return given
    is_path = isinstance(given.raw, str) and given.raw.endswith(RECIPE_SUFFIXES) and exists(Path(given.raw))
    return replace(given, name=RECIPE_NAMES[0], raw=[given.raw] if is_path else given.raw)  # type: ignore[list-item]
