"""Recipes: files of settings, and the resolved configuration written as one.

A recipe is YAML or JSON, flat (`learning_rate: 3e-4`) or by section (`optimizer: {learning_rate: 3e-4}`), named by its
path or, in this package's recipes folder, by its bare name. A file of another system is a recipe, too, and is
translated as it is read (`foreign/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.assignments import Assignment, Reader, names_setting
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.foreign.kinds import recognise, translate
from pretraining.config.foreign.translation import COMMAND_LINE, FILLED_IN, Note, Source, Translation
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, expand_home, format_value
from pretraining.errors import ConfigError
from pretraining.files import exists
from pretraining.progress import Duration

RECIPE_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py")
SHIPPED = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Returns the recipes of this package by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


@dataclass(frozen=True)
class Recipe:
    """A recipe's settings as raw text.

    Attributes:
        translation: of another system's file, what became of it.
        from_arguments: settings that arguments of the command line became, which were read with such a file; they
            count as the command line's.
    """

    name: str
    assignments: list[Assignment]
    translation: Translation | None = None
    from_arguments: list[Assignment] = field(default_factory=list)


def read_recipe(name: str, overrides: Mapping[str, Raw] | None = None, accept_llama: bool = False) -> Recipe:
    """Reads a recipe, a path or the name of a shipped one.

    Args:
        overrides: what the command line gives besides, by name; a file of another system may read some of them.
        accept_llama: take a file that describes another model for a Llama of the same shape.

    Raises:
        ConfigError: there is no such recipe, it is not valid, it is no mapping of settings, or of another system and
            cannot be translated.
    """
    path = _find(name)
    content = read_text(path, name)
    tree = parse_tree(content, name, path.suffix)
    if isinstance(tree, dict) and not _is_of_ours(tree):
        source = Source(name, path, content, tree, overrides or {})
        if recognise(source, path.suffix) or path.suffix in (".toml", ".py"):
            return _foreign_recipe(source, path.suffix, accept_llama)
    return Recipe(name, _settings_of_tree(tree, name, f"recipe {name}"))


def read_dotted_names(arguments: Mapping[str, Raw], accept_llama: bool = False) -> Recipe:
    """Reads arguments of the command line under the dotted names of a pipeline with composed configs.

    Raises:
        ConfigError: one cannot be translated.
    """
    return _foreign_recipe(Source(COMMAND_LINE, None, "", {}, arguments), ".yaml", accept_llama, "composed")


def translate_file(name: str, kind: str | None = None, accept_llama: bool = False) -> Recipe:
    """Reads a file of another system's settings; arguments are as in `read_recipe` and `translate`.

    Raises:
        ConfigError: there is no such file, it is of no known kind, or cannot be translated.
    """
    path = Path(name)
    if not exists(path):
        raise ConfigError(f"{name}: there is no such file")
    content = read_text(path, name)
    tree = parse_tree(content, name, path.suffix)
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{name} holds no settings")
    if kind is None and _is_of_ours(tree):
        raise ConfigError(f"{name} is a recipe of this project already: train with --recipe={name}")
    return _foreign_recipe(Source(name, path, content, tree), path.suffix, accept_llama, kind)


def parse_recipe(content: str, name: str) -> list[Assignment]:
    """Returns the settings in the content of a YAML recipe as raw text; messages call it by `name`.

    Raises:
        ConfigError: it is not valid, or no mapping of settings.
    """
    return _settings_of_tree(parse_tree(content, name), name, name)


def load_config(path: str | Path) -> TrainConfig:
    """Reads a resolved configuration back, as `dump_config` wrote it, without checking rules again.

    Raises:
        ConfigError: carries every problem of the file.
    """
    config, problems = _read_config(read_recipe(str(path)).assignments)
    if problems:
        raise ConfigError(problems)
    return config


def settings_in(content: str, name: str) -> TrainConfig:
    """Reads the resolved configuration that a checkpoint carries; messages call it by `name`.

    Settings that this version does not know or would refuse, because another version wrote them, keep their defaults.

    Raises:
        ConfigError: it is no YAML of settings.
    """
    return _read_config(parse_recipe(content, name))[0]


def dump_config(config: Any) -> str:
    """Writes a root of settings, resolved in full, as YAML by sections that `load_config` reads back equal."""
    tree: dict[str, Any] = {}
    values = values_of(config)
    for name, setting in settings_of(type(config)).items():
        target = tree.setdefault(setting.section, {}) if setting.section else tree
        target[name] = _plain(values[name])
    return yaml.dump(tree, Dumper=_FlowListDumper, sort_keys=False, allow_unicode=True, width=10**6)


def _read_config(source: Sequence[Assignment]) -> tuple[TrainConfig, list[str]]:
    """Returns the settings that can be read, over defaults, and what is wrong with others."""
    reader = Reader(TrainConfig)
    reader.read(source)
    config = reader.build()
    assert config is not None  # no setting of training must be given
    return config, reader.problems


def _find(name: str) -> Path:
    if name.endswith(RECIPE_SUFFIXES):
        try:
            path = Path(expand_home(name))
        except ValueError as error:
            raise ConfigError(f"--recipe={name}: {error}") from None
        if not exists(path):
            raise ConfigError(f"--recipe={name}: there is no such file")
        return path
    shipped = shipped_recipes()
    if name not in shipped:
        hint = did_you_mean(name, shipped, "did you mean {}? ")
        raise ConfigError(
            f"--recipe={name} is not known: {hint}Shipped are {', '.join(shipped)}; a recipe of your own is given by "
            f"its path, ending in {', '.join(RECIPE_SUFFIXES)}"
        )
    return shipped[name]


def _settings_of_tree(tree: Any, name: str, source: str) -> list[Assignment]:
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds no settings: write name: value on each line")
    return [replace(each, source=source) for each in _assignments(name, tree, "")]


def _is_of_ours(tree: Mapping[str, Any]) -> bool:
    """Whether every key is a setting of training, under a section or not."""
    keys = Source("", None, "", tree).flattened()
    return all(key in sections_of(TrainConfig) or names_setting(key) for key in keys)


def _foreign_recipe(source: Source, suffix: str, accept_llama: bool, kind: str | None = None) -> Recipe:
    translation = translate(source, suffix, kind, accept_llama)
    recipe = Recipe(source.name, [], translation)
    for setting, text in translation.settings.items():
        note = translation.note_of(setting)
        was_asked_for = note.origin == COMMAND_LINE and setting == next(iter(note.settings))
        target = recipe.from_arguments if was_asked_for else recipe.assignments
        target.append(Assignment(setting, text, where=note.told, flag=note.place, source=_source_of(note)))
    return recipe


def _source_of(note: Note) -> str:
    if note.origin == COMMAND_LINE:
        return f"command line, {note.key}"
    return f"translated from {note.key} of {note.origin}" + (
        f" ({FILLED_IN})" if note.remark.startswith(FILLED_IN) else ""
    )


def _assignments(recipe: str, tree: Mapping[str, Any], section: str) -> list[Assignment]:
    """Flattens a mapping; names carry the keys above them."""
    assignments = []
    for key, value in tree.items():
        if isinstance(value, dict):
            assignments += _assignments(recipe, value, f"{section}{key}.")
        elif value is not None or section or key not in sections_of(TrainConfig):  # a section may have nothing under it
            assignments.append(_assignment(recipe, f"{section}{key}", value))
    return assignments


def _assignment(recipe: str, name: str, value: Any) -> Assignment:
    raw: Raw
    if isinstance(value, list):
        if any(isinstance(item, (dict, list)) for item in value):
            raise ConfigError(f"{recipe}: {name}: a list holds plain values, not lists or mappings")
        raw = [format_value(item) for item in value]
        shown = f"[{', '.join(raw)}]"
    else:
        raw = None if value is None else format_value(value)
        shown = "null" if raw is None else raw
    return Assignment(name, raw, where=f"{recipe}: {name}: {shown}", flag=f"{recipe}: {name}")


def _plain(value: Any) -> Any:
    """Returns a value as YAML's own types, a duration as its text."""
    if isinstance(value, Duration):
        return value.amount if value.unit == "steps" else str(value)
    return list(value) if isinstance(value, tuple) else value


class _FlowListDumper(yaml.SafeDumper):
    """YAML with lists on one line."""


_FlowListDumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
# Unicode's line breaks are read back only where they are escaped, which double quotes do.
_FlowListDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None
    ),
)
