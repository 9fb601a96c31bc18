"""The way from the command line to a checked configuration.

    main(*overrides, **flags)      raw text, nothing parsed by fire (`fire.decorators.SetParseFn(str)`)
        overrides                  positional: learning_rate=3e-4
        flags                      --learning_rate=3e-4, --optimizer.learning_rate 3e-4, --use-dummy-dataset,
                                   --nomixed_precision

Defaults < recipes, left to right < command line, whose last argument for a setting counts. The rules over several
settings are checked last.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from pretraining.config.assignments import IGNORED_NAMES, RECIPE_NAMES, TRANSLATED, Assignment, Reader, setting_named
from pretraining.config.fields import setting, settings_of
from pretraining.config.recipes import RECIPE_SUFFIXES, RUN_CONFIG_FILE, Recipe, Translator, read_recipe
from pretraining.config.rules import find_problems, resolve_run_folder
from pretraining.config.run_recipe import continue_run
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, format_value, split_list
from pretraining.errors import ConfigError, PretrainError
from pretraining.files import exists, is_address, is_folder
from pretraining.progress import DefaultDuration, Duration

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecipeChoice:
    """Recipes to read, and concessions to recipes of other systems."""

    recipe: tuple[str, ...] = setting((), "comma list of recipes, read left to right")
    accept_llama: bool = setting(
        False, "if a recipe of another system describes another model, use a Llama of the same shape"
    )
    accept_unknown: bool = setting(False, "ignore unknown keys in a recipe of another system")


_FLAG = re.compile("--|-[a-zA-Z]")  # as fire tells flags from values

RECIPE_FLAGS = (*RECIPE_NAMES, *settings_of(RecipeChoice))
"""Flags that are not settings of a run."""


@dataclass(frozen=True)
class ResolvedConfig(Generic[T]):
    """A configuration, and what it was made of.

    Attributes:
        chosen: the assignment behind each setting that is not left at its default, by name.
        prepare: folder of the data that a recipe of another system names, and the command that fills it.
        returns: whether `resume_from_checkpoint` is a request; False = it is one that an earlier start of the run
            has done, and only recorded.
    """

    config: T
    chosen: Mapping[str, Assignment]
    prepare: tuple[str, str] | None = None
    returns: bool = True


def load_train_config(
    overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None, translate: Translator | None = None
) -> TrainConfig:
    """Read the settings of a training run, as `resolve_config` does."""
    return resolve_config(TrainConfig, overrides, flags, translate=translate).config


def resolve_config(
    root: type[T],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    defaults: Sequence[Assignment] = (),
    translate: Translator | None = None,
    *,
    continues_runs: bool = False,
) -> ResolvedConfig[T]:
    """Read a command line into a dataclass of settings, and check that the settings fit each other.

    For settings of training, the flag `recipe` (or `config`, or a path as the first word) names recipes, a comma list.
    The translation of another system's settings is logged.

    Args:
        root: dataclass of the settings.
        overrides: positional `name=value`; the last one of a name wins. The first may be a bare value for the setting
            declared as `first_word`, or several bare values if that setting is a list.
        flags: text by flag name, as fire passes it; "True", "False" or None for a flag without a value. From Python,
            any value that has a text form.
        defaults: assignments that recipes override, such as a checkpoint's settings.
        translate: reads recipes and arguments of other systems; None = not supported.
        continues_runs: whether a run's config.yaml is that run, in its folder (`continue_run`), and not settings alone.

    Raises:
        ConfigError: every problem found in recipes, flags and rules.
    """
    reader, recipes, has_recipes = _read(root, overrides, flags, defaults, translate)
    is_recorded = [continue_run(reader, recipe) for recipe in recipes if continues_runs]  # type: ignore[arg-type]
    config, problems = reader.build(), reader.problems
    if config is not None and has_recipes:  # without a recipe's settings, rules would report false problems
        config = resolve_run_folder(config, reader.chosen)
        problems += [_with_places(problem, reader.chosen) for problem in find_problems(config, reader.unreadable)]
    if config is None or problems:
        raise ConfigError(problems)
    warmup = reader.chosen.get("warmup_steps")
    if isinstance(config, TrainConfig) and any(warmup is each for recipe in recipes for each in recipe.defaults):
        length = config.schedule.warmup_steps or Duration(0, "steps")
        schedule = replace(config.schedule, warmup_steps=DefaultDuration(length.amount, length.unit))
        config = replace(config, schedule=schedule)
    for recipe in recipes:
        if recipe.system:
            lines = "\n".join(recipe.table)
            log.info("%s is read as settings of another system (%s):\n%s", recipe.name, recipe.system, lines)
    prepare = next((recipe.prepare for recipe in recipes if recipe.prepare is not None), None)
    return ResolvedConfig(config, reader.chosen, prepare, not any(is_recorded))


def _with_places(problem: str, chosen: Mapping[str, Assignment]) -> str:
    """Add to a problem the keys of another system's file that its settings come from."""
    places = _places([name for name in chosen if re.search(rf"\b{name}\b", problem)], chosen)
    return f"{problem} ({places})" if places else problem


@contextmanager
def naming_places(chosen: Mapping[str, Assignment]) -> Iterator[None]:
    """Add to errors of a `with` block the keys of another system's file that the settings in them come from."""
    try:
        yield
    except PretrainError as error:
        if places := _places(error.settings, chosen):
            error.args = (f"{error} ({places})",)
        raise


def _places(names: Collection[str], chosen: Mapping[str, Assignment]) -> str:
    given = [each.where for name, each in chosen.items() if name in names and each.source.startswith(TRANSLATED)]
    return "; ".join(dict.fromkeys(given))


def read_given(overrides: Sequence[str], flags: Mapping[str, Any], translate: Translator | None) -> Reader[TrainConfig]:
    """Return the settings of training in recipes and command line, without checks."""
    return _read(TrainConfig, overrides, flags, (), translate)[0]


def _read(
    root: type[T],
    overrides: Sequence[str],
    flags: Mapping[str, Any] | None,
    defaults: Sequence[Assignment],
    translate: Translator | None,
) -> tuple[Reader[T], list[Recipe], bool]:
    """Return the given settings, the recipes among their sources, and whether all recipes could be read."""
    reads_recipes = issubclass(root, TrainConfig)
    assignments, problems = read_arguments(*name_first_words(root, overrides, flags or {}), reads_recipes)
    recipes, given, recipe_problems = _read_recipes(assignments, translate) if reads_recipes else ([], assignments, [])
    names = [name for recipe in recipes for name in recipe.names]
    reader = Reader(root, also_known=[*RECIPE_FLAGS, *names] if reads_recipes else ())
    reader.problems += problems + recipe_problems
    foreign_defaults = [recipe.defaults for recipe in recipes]  # every recipe overrides them
    for source in (defaults, *foreign_defaults, *(recipe.assignments for recipe in recipes), given):
        reader.read(source)
    on_command_line = {assignment.section_and_name[1] for assignment in given}
    if "data_path" in on_command_line and "use_dummy_dataset" not in on_command_line:
        for read in (reader.values, reader.chosen):  # a data path replaces the recipe's generated data
            read.pop("use_dummy_dataset", None)
    return reader, recipes, not recipe_problems


def drop_overridden(root: type, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without those whose setting a later one gives, by this or another name.

    fire keeps neither the order of different names nor that of flags and positional arguments.
    """
    words: list[list[str]] = []  # an argument each, or a flag and its value
    for argument in arguments:
        is_value = bool(words) and len(words[-1]) == 1 and _FLAG.match(words[-1][0]) and "=" not in words[-1][0]
        if is_value and not _FLAG.match(argument):
            words[-1].append(argument)
        else:
            words.append([argument])
    reader: Reader[Any] = Reader(root)
    names = [_setting_given(reader, *each) for each in words]
    return [part for i, each in enumerate(words) if names[i] is None or names[i] not in names[i + 1 :] for part in each]


def _setting_given(reader: Reader[Any], word: str, value: str = "") -> str | None:
    """Return the setting that an argument gives; None for a bare path or an unknown name."""
    if not _FLAG.match(word) and is_bare_path(word):
        return None
    name = word.partition("=")[0].lstrip("-")
    spellings = [name] if value or "=" in word else [name, name.removeprefix("no").lstrip("-_")]  # --nomixed_precision
    assignments = [Assignment(each, value, where=word, flag=word) for each in spellings]
    if assignments[0].section_and_name[1] in RECIPE_NAMES:
        return RECIPE_NAMES[0]
    return next((setting.name for each in assignments if (setting := reader.find(each)) is not None), None)


def name_first_words(
    root: type, overrides: Sequence[str], flags: Mapping[str, Any]
) -> tuple[list[str], Mapping[str, Any]]:
    """Assign bare paths at the beginning to the setting declared as `first_word`, or else to the recipe.

    If that setting is a list, each word is one item if the path exists (folders of a sweep have commas in their names),
    else a comma list.

    Returns:
        Overrides and flags, with a name for every bare path.

    Raises:
        ConfigError: a comma list is malformed, or a flag sets the same list.
    """
    first = next((setting for setting in settings_of(root).values() if setting.first_word), None)
    words = list(takewhile(is_bare_path, overrides))
    if first is None or not first.many:
        if root is TrainConfig and words and is_folder(Path(words[0])):
            words[0] = _config_of_run(words[0])
        is_recipe = issubclass(root, TrainConfig) and bool(words) and words[0].endswith(RECIPE_SUFFIXES)
        name = first.name if first is not None else RECIPE_NAMES[0] if is_recipe else None
        named = [f"{name}={words[0]}"] if words and name else []
        second = next((setting.name for setting in settings_of(root).values() if setting.second_word), None)
        named += [f"{second}={words[1]}"] if named and second and len(words) > 1 else []
        return [*named, *overrides[len(named) :]], flags
    try:
        items = [item for word in words for item in ([word] if exists(Path(word)) else split_list(word))]
    except ValueError as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from None
    if words and first.name in flags:
        raise ConfigError(f"two values for {first.name}, {' '.join(words)} and --{first.name}={flags[first.name]}")
    return list(overrides[len(words) :]), {first.name: items, **flags} if words else flags


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


def read_arguments(
    overrides: Sequence[str], flags: Mapping[str, Any], reads_recipes: bool = True
) -> tuple[list[Assignment], list[str]]:
    """Return the assignments of a command line, and a problem per argument that assigns nothing.

    Args:
        reads_recipes: whether the command takes a recipe, which a bare path may mean.
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
            hint += ", or the folder of a run (there is no such one)" if reads_recipes and "/" in override else ""
            problems.append(f"{override!r} sets nothing: write {hint}")
    given = [_read_flag(name, value) for name, value in flags.items() if name.replace("-", "_") not in IGNORED_NAMES]
    return [*positional.values(), *given], problems


def _read_flag(name: str, value: Any) -> Assignment:
    """Return the assignment of one flag.

    fire passes a flag without a value as "True". If its name starts with "no", fire passes the rest of the name as
    "False"; for `--no-mixed_precision` the rest is `_mixed_precision`.
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
    """Return the recipes of a command line, left to right, its other assignments, and the problems of the recipes.

    A recipe of another system also translates arguments of that system. If unknown arguments remain, they may be
    settings of another system without a file: one more recipe, which overrides the others. Another system's defaults
    apply only where no recipe of this project is overridden.
    """
    settings = [given for given in assignments if given.section_and_name[1] not in RECIPE_FLAGS]
    reader = Reader(RecipeChoice)
    reader.read([_as_recipe_flag(given) for given in assignments if given.section_and_name[1] in RECIPE_FLAGS])
    if reader.problems:
        return [], settings, reader.problems
    names = reader.values.get("recipe", ())
    accepts = [name for name, value in reader.values.items() if value is True]
    recipes: list[Recipe] = []
    from_arguments: list[Assignment] = []
    problems: list[str] = []
    for name in (*names, None):  # None: the remaining arguments
        # Without a file, other systems write dotted or positional words; a plain flag is a setting of this project.
        foreign = [given for given in settings if name is not None or "." in given.name or given.flag[:1] != "-"]
        arguments = {given.name: given.raw for given in settings if given in foreign or setting_named(given.name)}
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
            if any(not before.system or name is None for before in recipes):
                recipe = replace(recipe, defaults=[], table=recipe.given_table)
            recipes.append(recipe)
            from_arguments += recipe.from_arguments
            settings = [given for given in settings if given.name not in recipe.used]
    if accepts and not problems and not any(recipe.system for recipe in recipes):
        problems.append(f"--{accepts[0]} is for recipes of other systems, and none is given")
    if problems:  # unknown arguments may belong to a recipe that could not be read
        settings = [given for given in settings if setting_named(given.name) is not None]
    return recipes, [*from_arguments, *settings], problems


def _as_recipe_flag(given: Assignment) -> Assignment:
    """Rename `config` to `recipe`; an existing path with a comma becomes a list of one."""
    if given.section_and_name[1] not in RECIPE_NAMES:
        return given
    is_path = isinstance(given.raw, str) and given.raw.endswith(RECIPE_SUFFIXES) and exists(Path(given.raw))
    return replace(given, name=RECIPE_NAMES[0], raw=[given.raw] if is_path else given.raw)  # type: ignore[list-item]
