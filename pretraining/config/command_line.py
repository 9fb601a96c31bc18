"""The command line: from what fire hands over to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

Settings come from defaults < recipes, left to right < command line; then the rules over several settings are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader, names_setting
from pretraining.config.fields import sections_of, settings_of
from pretraining.config.foreign import composed
from pretraining.config.foreign.kinds import KINDS
from pretraining.config.foreign.translation import ACCEPT_LLAMA, TranslationError
from pretraining.config.recipes import RECIPE_SUFFIXES, Recipe, read_dotted_names, read_recipe
from pretraining.config.rules import find_problems, settle_run_folder
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, parse_bool, split_list
from pretraining.errors import ConfigError
from pretraining.files import exists

T = TypeVar("T")
log = logging.getLogger(__name__)

ABOUT_RECIPES = (*RECIPE_NAMES, ACCEPT_LLAMA)
"""Names on a command line that are no settings: which recipes are read, and how."""


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """A configuration, and by name the assignment that each setting comes from; the others keep their defaults."""

    config: T
    chosen: Mapping[str, Assignment]


def load_train_config(overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads the settings of a training run; see `parse_config`."""
    return parse_config(TrainConfig, overrides, flags)


def parse_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
) -> T:
    """Reads a command line into a dataclass of settings, as `resolve_config` does."""
    return resolve_config(root, overrides, flags, beneath).config


def resolve_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
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

    Raises:
        ConfigError: carries every problem found, of recipes, flags and rules.
    """
    reads_recipes = issubclass(root, TrainConfig)
    assignments, problems = read_arguments(*name_first_words(root, overrides, flags or {}), reads_recipes)
    recipes, given, problems_of_recipes = _read_recipes(assignments) if reads_recipes else ([], assignments, [])
    reader = Reader(root, also_known=_names_besides_settings(recipes) if reads_recipes else ())
    for source in (beneath, *(recipe.assignments for recipe in recipes), given):
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
        if recipe.translation is not None:
            lines = "\n".join(recipe.translation.table())
            log.info("%s is read as settings of another system (%s):\n%s", recipe.name, recipe.translation.kind, lines)
    return ResolvedConfig(config, reader.chosen)


def value_on_command_line(name: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> Any:
    """Returns what the command line alone sets a setting of training to; None without a readable value."""
    assignments = [
        given for given in read_arguments(overrides, flags)[0] if given.section_and_name[1] not in RECIPE_NAMES
    ]
    reader = Reader(TrainConfig)
    reader.read(_read_recipes(assignments)[1])
    return reader.values.get(name)


def value_given(name: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> Any:
    """Returns what recipes and the command line set a setting of training to; None without a readable value."""
    recipes, given, _ = _read_recipes(read_arguments(_name_first_word(TrainConfig, overrides), flags)[0])
    reader = Reader(TrainConfig)
    for source in (*(recipe.assignments for recipe in recipes), given):
        reader.read(source)
    return reader.values.get(name)


def _names_besides_settings(recipes: Sequence[Recipe]) -> list[str]:
    """Returns what a misspelt name may have meant besides a setting."""
    kinds = ["composed", *(recipe.translation.kind for recipe in recipes if recipe.translation)]
    return [*ABOUT_RECIPES, *(name for kind in kinds for name in KINDS[kind].arguments)]


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


@dataclass
class _Reading:
    """A command line on its way to recipes and settings.

    Attributes:
        settings: its arguments that no recipe has read.
        from_arguments: what those became that one has.
        problems: of recipes.
    """

    settings: list[Assignment]
    recipes: list[Recipe] = field(default_factory=list)
    from_arguments: list[Assignment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, read: Callable[[Mapping[str, Raw]], Recipe]) -> None:
        """Reads a recipe, which may take arguments of the command line."""
        used: frozenset[str] = frozenset()
        try:
            recipe = read({given.name: given.raw for given in self.settings})
        except ConfigError as error:
            self.problems += error.problems
            used = error.used_overrides if isinstance(error, TranslationError) else used
        else:
            self.from_arguments += recipe.from_arguments
            self.recipes.append(recipe)
            used = recipe.translation.used_overrides if recipe.translation else used
        self.problems += _twice(self.settings, used)
        self.settings = [given for given in self.settings if given.name not in used]


def _read_recipes(assignments: Sequence[Assignment]) -> tuple[list[Recipe], list[Assignment], list[str]]:
    """Returns the recipes that a command line names, left to right, its settings, and what is wrong with recipes.

    Its arguments under dotted names of a pipeline with composed configs are one more recipe, above the others.
    """
    reading = _Reading(_settings_among(assignments))
    named = [given for given in assignments if given.section_and_name[1] in RECIPE_NAMES]
    try:
        names, accept_llama = _names_of_recipes(named), _accepts_llama(assignments)
    except ConfigError as error:
        return [], reading.settings, list(error.problems)
    for name in names:
        reading.add(lambda arguments, name=name: read_recipe(name, arguments, accept_llama))  # type: ignore[misc]
    if reading.problems and len(names) > 1 and isinstance(named[0].raw, str):
        reading.problems[-1] += ". (A comma parts recipes. A path with a comma is given alone, or the file renamed)"
    if reading.problems:  # what could not be read might have taken arguments that are none of ours
        reading.settings = [given for given in reading.settings if not _may_be_foreign(given.name)]
    elif any(composed.knows(given.name) and not names_setting(given.name) for given in reading.settings):
        reading.add(lambda arguments: read_dotted_names(arguments, accept_llama))
    if accept_llama and not reading.problems and not any(recipe.translation for recipe in reading.recipes):
        reading.problems.append(f"--{ACCEPT_LLAMA} is about recipes of other systems, and none is given")
    return reading.recipes, [*reading.from_arguments, *reading.settings], reading.problems


def _may_be_foreign(name: str) -> bool:
    """Whether a name is none of this project's, and may be one of another system: it has parts, or is a group's."""
    is_group = name in sections_of(TrainConfig) or composed.knows(name)
    return not names_setting(name) and (is_group or bool({".", "/"} & set(name)))


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


def _accepts_llama(assignments: Sequence[Assignment]) -> bool:
    """Returns the value of the switch; a ConfigError where it is neither true nor false."""
    given = [assignment for assignment in assignments if assignment.section_and_name[1] == ACCEPT_LLAMA]
    try:
        return bool(given) and parse_bool(str(given[-1].raw))
    except ValueError as error:
        raise ConfigError(f"{given[-1].where}: {error}") from None


def _is_one_path(text: str) -> bool:
    """Whether a text with commas is the path of a recipe all the same, because a file is there."""
    return "," in text and text.endswith(RECIPE_SUFFIXES) and exists(Path(text))
