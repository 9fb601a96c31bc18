"""Recipes and words of other systems, in the order in which they win with those of this project.

recipe -> its system, by its keys -> `Translation` -> assignments of this project
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretraining.config.assignments import Assignment, Reader, setting_named
from pretraining.config.fields import settings_of
from pretraining.config.read import read_values, recipe_names
from pretraining.config.recipe_files import RECIPE_SUFFIXES, find_recipe, read_recipe
from pretraining.config.training import TrainConfig
from pretraining.config.values import format_value
from pretraining.errors import ConfigError, DataError
from pretraining.files import exists
from pretraining.tools.command_settings import TranslateConfig
from pretraining.tools.translate import composed, deepspeed, guide, nanogpt, stub
from pretraining.tools.translate.engine import ACCEPT_LLAMA, ACCEPT_UNKNOWN, KeyValue, System, Translation
from pretraining.tools.translate.foreign_files import compose, read_settings, text_of

log = logging.getLogger(__name__)

SYSTEMS = {table.SYSTEM.kind: table.SYSTEM for table in (stub, guide, deepspeed, composed, nanogpt)}
_PYTHON = ".py"
_LEFT_OPEN = """
    seq_length batch_size num_steps mixed_precision optimizer learning_rate weight_decay adam_beta2 grad_clip_thresh
    schedule warmup_steps
"""
"""Settings of learning, which are named if nothing sets them beside another system's file."""


@dataclass(frozen=True)
class Translated:
    """Assignments of this project, in order of precedence, and the translations that some of them come from.

    Attributes:
        defaults: those of the assignments that are defaults of other systems.
    """

    assignments: Sequence[Assignment]
    translations: Sequence[Translation]
    defaults: Sequence[Assignment]

    def not_given(self) -> Iterator[str]:
        """Yield a line with the defaults of other systems, and one with the settings of learning that are left open."""
        if self.defaults:
            yield f"not given, and as there: {', '.join(f'{default.name}={default.raw}' for default in self.defaults)}"
        files = [read.name for read in self.translations if read.name != composed.WORDS]
        values = read_values(TrainConfig, self.assignments).values if files else {}
        defaults = {name: settings_of(TrainConfig)[name].default for name in _LEFT_OPEN.split() if name not in values}
        texts = [name if value is None else f"{name}={format_value(value)}" for name, value in defaults.items()]
        if files and texts:
            yield f"left open by {', '.join(files)}, and as here: {', '.join(texts)}"


def translate_and_log(root: type, given: Sequence[Assignment]) -> list[Assignment]:
    """Translate what a user gave for a command with these settings, and log what became of each key.

    Raises:
        ConfigError: recipes that cannot be read or translated.
        DataError: training needs data that another system makes on the way; the message has the command.
    """
    translated = translate_all(given)
    for read in translated.translations:
        table = "\n".join(read.table())
        log.info("%s is read as settings of another system (%s):\n%s", read.name, read.system.kind, table)
    for line in translated.not_given():
        log.info("%s", line)
    for folder, command in [read.prepare for read in translated.translations if read.prepare is not None]:
        values = read_values(root, translated.assignments).values
        is_used = values.get("data_path") == folder and not values.get("use_dummy_dataset")
        if root is TrainConfig and is_used and not exists(Path(folder)):
            raise DataError(f"there is no data yet in {folder}. Prepare it, then give this command again:\n  {command}")
    return list(translated.assignments)


def translate_all(given: Sequence[Assignment], kind: str | None = None) -> Translated:
    """Translate the recipes and words of other systems.

    A file takes words of its system, too. Dotted or positional words that are left may be settings of composed configs.
    A default of another system applies only if no recipe of this project stands before its file or words.

    Args:
        kind: system of the recipes; None = detected from their keys.

    Raises:
        ConfigError: recipes that cannot be read or translated.
    """
    accepts, given = _split_accepts(given)
    names, words = recipe_names(given)
    defaults, recipes, typed = list[Assignment](), list[Assignment](), list[Assignment]()
    translations, problems, has_own = list[Translation](), list[str](), False
    for name in [*names, None]:
        if name is None and problems:
            break
        try:
            read = _translate_words(words, accepts) if name is None else _read_recipe(name, words, accepts, kind)
        except ConfigError as error:
            problems += error.problems
            continue
        if not isinstance(read, Translation):
            recipes += read
            has_own = has_own or name is not None
            continue
        translations.append(read)
        implied, from_file, from_words = read.assignments()
        recipes += [*implied, *from_file]
        typed += from_words
        defaults += [] if has_own or (name is None and names) else read.defaults()
        words = [word for word in words if word.name not in read.used]
    if accepts and not translations:
        problems.append(f"--{accepts[0]} is for recipes of other systems, and none is given")
    if problems:
        raise ConfigError(problems)
    return Translated([*defaults, *recipes, *typed, *words], translations, defaults)


def _split_accepts(given: Sequence[Assignment]) -> tuple[list[str], list[Assignment]]:
    """Return the names of `accept_…` flags that are set, and the other assignments."""
    flags = [word for word in given if word.section_and_name[1] in (ACCEPT_LLAMA, ACCEPT_UNKNOWN)]
    reader = Reader(TranslateConfig)
    reader.read(flags)
    if reader.problems:
        raise ConfigError(reader.problems)
    return [name for name, value in reader.values.items() if value], [word for word in given if word not in flags]


# Files


def _read_recipe(
    name: str, words: Sequence[Assignment], accepts: Collection[str], kind: str | None
) -> Translation | list[Assignment]:
    """Return the translation of another system's file, or the assignments of a recipe of this project.

    Raises:
        ConfigError: every problem of the file.
    """
    path = find_recipe(name, (*RECIPE_SUFFIXES, _PYTHON))
    values = read_settings(path)
    kind = kind or _kind_of_file(values, name)
    if kind is None:
        return read_recipe(name)
    typed = _texts_of(words)
    given, used = [KeyValue(key, text, name) for key, text in values.items()], set[str]()
    if kind == "composed" and "defaults" in values:
        given, used = compose(path, name, typed)
    return _translate(SYSTEMS[kind], name, given, typed, accepts, used)


def _kind_of_file(values: Mapping[str, str | None], name: str) -> str | None:
    """Return the system that a file is of; None for a recipe of this project.

    A YAML or JSON file is another system's by at least two keys that only this system has, if it has no key that only
    this project has; a Python file by one key.

    Raises:
        ConfigError: the file may be of several systems, or is Python of none.
    """
    if "defaults" in values:
        return "composed"
    owners = {key: [kind for kind, system in SYSTEMS.items() if system.name_of(key) in system.rows] for key in values}
    signs = [kinds[0] for key, kinds in owners.items() if len(kinds) == 1 and setting_named(key) is None]
    is_python = name.endswith(_PYTHON)
    if not is_python and any(setting_named(key) and not owners[key] for key in values):
        return None
    kinds = [kind for kind in SYSTEMS if signs.count(kind) >= (1 if is_python else 2)]
    if len(kinds) == 1 or not (kinds or is_python):
        return kinds[0] if kinds else None
    choice = f"pretrain translate {shlex.quote(name)} --from=KIND --output_path=mine.yaml; then train with that recipe"
    raise ConfigError(f"{name} may be of {' or '.join(kinds or SYSTEMS)}. Choose: {choice}")


# Words


def _translate_words(words: Sequence[Assignment], accepts: Sequence[str]) -> Translation | list[Assignment]:
    """Return the translation of words without a file; an empty list if all of them are this project's.

    Raises:
        ConfigError: every problem of the words.
    """
    named = [word for word in words if "." in word.name or not word.flag.startswith("-") or setting_named(word.name)]
    translation = _translate(composed.SYSTEM, composed.WORDS, [], _texts_of(named), accepts, set())
    return translation if translation.used else []


def _translate(
    system: System,
    name: str,
    values: Sequence[KeyValue],
    typed: Mapping[str, str | None],
    accepts: Collection[str],
    used: set[str],
) -> Translation:
    """Return the translation of a file's values and of the typed words that set its keys, or of words alone.

    Args:
        used: names of words that have no other use; those that set keys are added.
    """
    given, problems, flags = dict[str, KeyValue](), list[str](), dict[str, str]()
    for value in values:
        before = given.setdefault(system.name_of(value.key), value)
        if before.text != value.text:
            problems.append(f"two values for {system.name_of(value.key)}: {before.quote} and {value.quote}: keep one")
    for word, text in [(word, text) for word, text in typed.items() if word not in used]:
        key, ours = system.name_of(word.replace("-", "_")), setting_named(word)
        if key in system.rows and (ours is None or values):
            given[key] = KeyValue(word, text)
            used.add(word)
        elif ours is not None:
            flags[ours] = text or "none"
    return Translation(system, name, given, flags, accepts, used, problems=problems).run()


def _texts_of(words: Sequence[Assignment]) -> dict[str, str | None]:
    """Return the values of typed words as in a file, by name; None for null."""
    texts = {word.name: text_of(word.raw) for word in words if word.name}
    return {name: None if (text or "").strip().lower() in ("null", "none") else text for name, text in texts.items()}
