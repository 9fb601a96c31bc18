"""The command line: from what fire hands over to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

Settings come from defaults < recipes, left to right < command line; then the rules over several settings are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader
from pretraining.config.fields import settings_of
from pretraining.config.recipes import RECIPE_SUFFIXES, read_recipe
from pretraining.config.rules import find_problems
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError
from pretraining.files import exists

T = TypeVar("T")


def load_train_config(overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads the settings of a training run; see `parse_config`."""
    return parse_config(TrainConfig, overrides, flags)


def parse_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
) -> T:
    """Reads a command line into a dataclass of settings, and checks that they fit each other.

    Where the settings are those of training, the flag `recipe` (or `config`) names recipes, a comma list.

    Args:
        root: the dataclass.
        overrides: positional `name=value`; of the same name the last one counts. The first may be a value alone, of a
            setting that is declared as `first_word`.
        flags: text by flag name, as fire hands it over; "True", "False" or None stand for a flag without a value. From
            Python, any value that can be written as text.
        beneath: settings that come before those of recipes, such as a checkpoint's.

    Raises:
        ConfigError: carries every problem found, of recipes, flags and rules.
    """
    assignments, problems = read_arguments(_name_first_word(root, overrides), flags or {})
    recipe_names = RECIPE_NAMES if issubclass(root, TrainConfig) else ()
    recipes, problems_of_recipes = _read_recipes([given for given in assignments if given.name in recipe_names])
    reader = Reader(root, also_known=recipe_names)
    for source in (beneath, *recipes, [given for given in assignments if given.name not in recipe_names]):
        reader.read(source)
    config = reader.build()
    problems += problems_of_recipes + reader.problems
    # Without its recipe a run looks incomplete in ways that it is not.
    if config is not None and not problems_of_recipes:
        problems += find_problems(config, reader.unreadable)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def value_on_command_line(name: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> Any:
    """Returns what the command line alone sets a setting of training to; None without a readable value."""
    assignments, _ = read_arguments(overrides, flags)
    reader = Reader(TrainConfig)
    reader.read([given for given in assignments if given.name not in RECIPE_NAMES])
    return reader.values.get(name)


def value_given(name: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> Any:
    """Returns what recipes and the command line set a setting of training to; None without a readable value."""
    assignments, _ = read_arguments(overrides, flags)
    recipes, _ = _read_recipes([given for given in assignments if given.name in RECIPE_NAMES])
    reader = Reader(TrainConfig)
    for source in (*recipes, [given for given in assignments if given.name not in RECIPE_NAMES]):
        reader.read(source)
    return reader.values.get(name)


def _name_first_word(root: type, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides, the first of them with its name where it is a path alone."""
    first, *others = overrides or [""]
    names = [setting.name for setting in settings_of(root).values() if setting.first_word]
    is_path = bool(names and first) and ("=" not in first or exists(Path(first)))
    return [f"{names[0]}={first}", *others] if is_path else list(overrides)


def read_arguments(overrides: Sequence[str], flags: Mapping[str, Any]) -> tuple[list[Assignment], list[str]]:
    """Returns the assignments of a command line, and a problem for each argument that assigns nothing."""
    problems = []
    positional = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if equals:
            name = name.strip().lstrip("-")
            positional[name] = Assignment(name, text, where=override, flag=name)
        else:
            hint = f"--recipe={override}" if override.endswith(RECIPE_SUFFIXES) else "name=value or --name=value"
            problems.append(f"{override!r} sets nothing: write {hint}")
    given = [_read_flag(name, value) for name, value in flags.items() if name.replace("-", "_") not in IGNORED_NAMES]
    return [*positional.values(), *given], problems


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


def _read_recipes(assignments: Sequence[Assignment]) -> tuple[list[list[Assignment]], list[str]]:
    """Returns the settings of each named recipe, left to right, and what is wrong with others."""
    if len(assignments) > 1:
        given = " and ".join(assignment.where for assignment in assignments)
        return [], [f"recipes are named twice, {given}: write one comma list, read left to right"]
    if assignments and assignments[0].valueless:
        return [], [f"{assignments[0].flag} is given no value: write {assignments[0].flag}=…"]
    recipes = []
    problems: list[str] = []
    raw = assignments[0].raw if assignments else None
    try:
        names = [raw] if isinstance(raw, str) and _is_one_path(raw) else split_list(raw)
    except ValueError as error:
        return [], [f"{assignments[0].where}: {error}"]
    for name in names:
        try:
            recipes.append(read_recipe(name))
        except ConfigError as error:
            problems += error.problems
    if problems and isinstance(raw, str) and len(names) > 1:
        problems[-1] += ". (A comma parts recipes. A path with a comma is given alone, or the file renamed)"
    return recipes, problems


def _is_one_path(text: str) -> bool:
    """Whether a text with commas is the path of a recipe all the same, because a file is there."""
    return "," in text and text.endswith(RECIPE_SUFFIXES) and exists(Path(text))
