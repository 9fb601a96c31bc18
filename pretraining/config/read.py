"""From assignments to settings: the only reader of what a user gives.

    words, values --`read_words`, `assign`--> assignments --`translate`--> assignments of this project, recipes expanded
        --`read`--> Given: settings, and the place that each comes from

Defaults < recipes, left to right < command line, whose last word for a setting counts. Some defaults depend on other
settings (`with_defaults`). The rules over what is given are checked last.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import COMMAND_LINE, RECIPE_NAMES, Assignment, Reader
from pretraining.config.command_line import assign, read_words
from pretraining.config.fields import setting, settings_of, values_of
from pretraining.config.plugins import SCHEDULES
from pretraining.config.recipe_files import read_recipe
from pretraining.config.rules import find_problems
from pretraining.config.run_recipe import continue_run
from pretraining.config.training import TrainConfig
from pretraining.config.variants import name_block
from pretraining.errors import ConfigError, PretrainError, Problem
from pretraining.files import as_local, exists

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given(Generic[T]):
    """Settings as a user gives them.

    Attributes:
        chosen: the assignment behind each setting that is not left at its default, by name.
    """

    config: T
    chosen: Mapping[str, Assignment]


def read(root: type[T], given: Sequence[Assignment], *, continues_runs: bool = False) -> Given[T]:
    """Read assignments into a dataclass of settings, and check that the settings fit each other.

    Args:
        root: dataclass of the settings.
        given: later sources win.
        continues_runs: whether a run's config.yaml is that run, in its folder (`continue_run`), and not settings alone.

    Raises:
        ConfigError: every problem found in assignments and rules.
    """
    reader = read_values(root, given)
    for recipe in dict.fromkeys(assignment.source for assignment in given) if continues_runs else ():
        continue_run(reader, recipe)  # type: ignore[arg-type]
    _replace_schedule(reader)
    config, problems = reader.build(), list[str | Problem](reader.problems)
    if config is not None:
        config = with_defaults(config, reader.chosen)
        problems += [_with_places(problem, reader.chosen) for problem in find_problems(config, reader.unreadable)]
    if config is None or problems:
        raise ConfigError(problems)
    name_block(values_of(config).get("block"))
    return Given(config, reader.chosen)


def check_config(config: T) -> T:
    """Return settings made in Python as if their values had been typed: converted, with defaults, and checked.

    Raises:
        ConfigError: every problem found.
    """
    settings = settings_of(type(config))
    changed = {name: value for name, value in values_of(config).items() if value != settings[name].default}
    return read(type(config), assign(changed)).config


def load_train_config(words: Sequence[str] = (), settings: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read the settings of a training run from words of the command line and values by name."""
    given = [*read_words(TrainConfig, words), *assign(settings or {})]
    return read(TrainConfig, read_recipes(given)).config


def read_values(root: type[T], given: Sequence[Assignment]) -> Reader[T]:
    """Return the settings that assignments give, without checks of rules."""
    reader = Reader(root)
    reader.read(given)
    on_command_line = {assignment.section_and_name[1] for assignment in given if assignment.source == COMMAND_LINE}
    if "data_path" in on_command_line and "use_dummy_dataset" not in on_command_line:
        for kept in (reader.values, reader.chosen):  # a data path replaces the recipe's generated data
            kept.pop("use_dummy_dataset", None)
    return reader


def _replace_schedule(reader: Reader[Any]) -> None:
    """Leave out a recipe's schedule in the annealing stage, which replaces it; a typed one is refused later."""
    if reader.values.get("training_stage") != "annealing":
        return
    of_schedule = {"schedule", *(option for entry in SCHEDULES.values() for option in entry.options)} - {"min_lr_ratio"}
    for name in sorted(of_schedule & reader.chosen.keys()):
        if (given := reader.chosen[name]).source != COMMAND_LINE:
            if reader.values[name] != reader.settings[name].default:
                log.info("%s is left out: --training_stage=annealing replaces the schedule", given.where)
            del reader.values[name], reader.chosen[name]


def with_defaults(config: T, given: Collection[str]) -> T:
    """Set the defaults that depend on other settings: no run folder with generated data, no tracker without a folder.

    The path of a local tokenizer gets a form that is no name on the Hub, where a start from another folder may look.

    Args:
        config: settings; only a `TrainConfig` changes.
        given: names of the settings that the user gave.
    """
    if not isinstance(config, TrainConfig):
        return config
    path = config.data.tokenizer_path
    config = replace(config, data=replace(config.data, tokenizer_path=None if path is None else as_local(path)))
    if config.evaluation.eval_only:
        return config
    checkpoint, report = config.checkpoint, config.report
    if config.data.use_dummy_dataset and "ckpt_save_path" not in given:
        checkpoint = replace(checkpoint, ckpt_save_path=None)
    if checkpoint.ckpt_save_path is None and report.tracker_dir is None and "tracker" not in given:
        report = replace(report, tracker=())
    return replace(config, checkpoint=checkpoint, report=report)


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


# Recipes


@dataclass(frozen=True)
class RecipeNames:
    """Names of recipes."""

    recipe: tuple[str, ...] = setting((), "comma list of recipes, read left to right")


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
