"""The command line: from what fire hands over to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

`load_train_config` is the entry of a training run: defaults < recipes, left to right < command line, then the rules
over several settings. `parse_config` reads any dataclass of settings, without recipes and rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, Assignment, Reader
from pretraining.config.recipes import RECIPE_SUFFIXES, read_recipe
from pretraining.config.rules import find_problems
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError

T = TypeVar("T")
Run = TypeVar("Run", bound=TrainConfig)


def parse_config(root: type[T], overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> T:
    """Parses a command line into a dataclass of settings.

    Args:
        root: the dataclass.
        overrides: positional `name=value`; of the same name the last one counts.
        flags: text by flag name, as fire hands it over; "True", "False" or None stand for a flag without a value. From
            Python, any value that can be written as text.

    Raises:
        ConfigError: carries every problem found.
    """
    assignments, problems = _read_arguments(overrides, flags or {})
    reader = Reader(root)
    reader.read(assignments)
    config = reader.build()
    if config is None or problems or reader.problems:
        raise ConfigError(problems + reader.problems)
    return config


def load_train_config(overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads recipes and the command line of a training run, and checks that the settings fit each other.

    The flag `recipe` (or `config`) names recipes, a comma list read left to right.

    Raises:
        ConfigError: carries every problem found, of recipes, flags and rules.
    """
    return load_run_config(TrainConfig, overrides, flags)


def load_run_config(
    root: type[Run],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    beneath: Sequence[Assignment] = (),
) -> Run:
    """Does what `load_train_config` does for a root that may have sections besides those of training.

    Settings `beneath`, such as a checkpoint's, come before those of recipes.

    Raises:
        ConfigError: carries every problem found, of recipes, flags and rules.
    """
    assignments, problems = _read_arguments(overrides, flags or {})
    recipes, problems_of_recipes = _read_recipes([given for given in assignments if given.name in RECIPE_NAMES])
    problems += problems_of_recipes
    reader = Reader(root, also_known=RECIPE_NAMES)
    for recipe in (beneath, *recipes):
        reader.read(recipe)
    reader.read([given for given in assignments if given.name not in RECIPE_NAMES])
    config = reader.build()
    problems += reader.problems
    # Without its recipe a run looks incomplete in ways that it is not.
    if config is not None and not problems_of_recipes:
        problems += find_problems(config, reader.unreadable)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def value_on_command_line(name: str, overrides: Sequence[str], flags: Mapping[str, Any]) -> Any:
    """Returns what the command line itself sets a setting of training to; None where it does not, or not readably."""
    assignments, _ = _read_arguments(overrides, flags)
    reader = Reader(TrainConfig)
    reader.read([given for given in assignments if given.name not in RECIPE_NAMES])
    return reader.values.get(name)


def _read_arguments(overrides: Sequence[str], flags: Mapping[str, Any]) -> tuple[list[Assignment], list[str]]:
    """Returns the assignments of a command line, and the problems with arguments that assign nothing."""
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

    Of a flag without a value fire makes "True", and of one that starts with "no" as well "False" under the name without
    it; what `--no-mixed_precision` leaves behind is `_mixed_precision`.
    """
    if isinstance(value, (list, tuple)):
        raw: Raw = [format_value(item) for item in value]
        return Assignment(name, raw, where=f"--{name}={format_value(tuple(value))}", flag=f"--{name}")
    text = "True" if value is None else format_value(value)
    if text == "False":
        name = name.lstrip("-_")
    return Assignment(name, text, where=f"--{name}={text}", flag=f"--{name}", valueless=text in ("True", "False"))


def _read_recipes(assignments: Sequence[Assignment]) -> tuple[list[list[Assignment]], list[str]]:
    """Returns the settings of each recipe that is named, left to right, and the problems of the unreadable."""
    if len(assignments) > 1:
        given = " and ".join(assignment.where for assignment in assignments)
        return [], [f"recipes are named twice, {given}: write one comma list, read left to right"]
    if assignments and assignments[0].valueless:
        return [], [f"{assignments[0].flag} is given no value: write {assignments[0].flag}=…"]
    recipes = []
    problems: list[str] = []
    try:
        names = split_list(assignments[0].raw) if assignments else []
    except ValueError as error:
        return [], [f"{assignments[0].where}: {error}"]
    for name in names:
        try:
            recipes.append(read_recipe(name))
        except ConfigError as error:
            problems += error.problems
    return recipes, problems
