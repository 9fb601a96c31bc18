"""Recipes: files of settings, and the resolved configuration written as one.

A recipe is YAML or JSON, flat (`learning_rate: 3e-4`) or by section (`optimizer: {learning_rate: 3e-4}`), named by its
path or, in this package's recipes folder, by its bare name. A file of another system is a recipe, too, where the caller
hands over a `Translator`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.assignments import Assignment, Reader, setting_named
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, expand_home, format_value
from pretraining.errors import ConfigError
from pretraining.files import exists
from pretraining.progress import Duration

OF_OTHER_SYSTEMS = (".toml", ".py")
RECIPE_SUFFIXES = (".yaml", ".yml", ".json", *OF_OTHER_SYSTEMS)
SHIPPED = Path(__file__).parent / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of this package by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


@dataclass(frozen=True)
class Recipe:
    """A recipe's settings as raw text.

    Attributes:
        defaults: settings that another system takes where its file is silent; every recipe wins over them.
        from_arguments: settings that arguments of the command line became, which were read with the file of another
            system; they count as the command line's.
        used: names of these arguments.
        names: what other arguments may have meant.
        system: that the file is of; "" of a recipe of this project.
        table: what became of each key of such a file, in lines.
    """

    name: str
    assignments: list[Assignment]
    defaults: list[Assignment] = field(default_factory=list)
    from_arguments: list[Assignment] = field(default_factory=list)
    used: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    system: str = ""
    table: tuple[str, ...] = ()


Translator = Callable[[Path | None, str, Mapping[str, Raw], Collection[str]], Recipe | None]
"""Reads the settings of another system as a recipe; the command line hands one over.

It takes a file, or None if arguments alone may be words of another system, its name in messages, the arguments of the
command line by name, and switches that say what may be left out of a file. It returns None if the file is of no known
system, and raises a ConfigError if it cannot be translated.
"""


def read_recipe(
    name: str,
    translate: Translator | None = None,
    arguments: Mapping[str, Raw] | None = None,
    accepts: Collection[str] = (),
) -> Recipe:
    """Read a recipe, a path or the name of a shipped one; the other arguments are those of a `Translator`.

    Raises:
        ConfigError: there is no such recipe, it is not valid, it is no mapping of settings, or of another system and
            cannot be translated.
    """
    path = _find(name)
    if path.suffix in OF_OTHER_SYSTEMS:
        recipe = translate(path, name, arguments or {}, accepts) if translate is not None else None
        if recipe is None:
            raise ConfigError(f"--recipe={name} is of another system: pretrain translate {name} makes a recipe of it")
        return recipe
    tree = parse_tree(read_text(path, name), name, path.suffix)
    if translate is not None and isinstance(tree, dict) and not is_of_ours(tree):
        recipe = translate(path, name, arguments or {}, accepts)
        if recipe is not None:
            return recipe
    return Recipe(name, _settings_of_tree(tree, name, f"recipe {name}"))


def parse_recipe(content: str, name: str) -> list[Assignment]:
    """Return the settings in the content of a YAML recipe as raw text; messages call it by `name`.

    Raises:
        ConfigError: it is not valid, or no mapping of settings.
    """
    return _settings_of_tree(parse_tree(content, name), name, name)


def load_config(path: str | Path) -> TrainConfig:
    """Read a resolved configuration back, as `dump_config` wrote it, without checking rules again.

    Raises:
        ConfigError: carries every problem of the file.
    """
    config, problems = _read_config(read_recipe(str(path)).assignments)
    if problems:
        raise ConfigError(problems)
    return config


def settings_in(content: str, name: str) -> TrainConfig:
    """Read the resolved configuration that a checkpoint carries; messages call it by `name`.

    Settings that this version does not know or would refuse, because another version wrote them, keep their defaults.

    Raises:
        ConfigError: it is no YAML of settings.
    """
    return _read_config(parse_recipe(content, name))[0]


def dump_config(config: Any) -> str:
    """Write a root of settings, resolved in full, as YAML by sections that `load_config` reads back equal."""
    tree: dict[str, Any] = {}
    values = values_of(config)
    for name, setting in settings_of(type(config)).items():
        target = tree.setdefault(setting.section, {}) if setting.section else tree
        target[name] = _plain(values[name])
    return yaml.dump(tree, Dumper=_FlowListDumper, sort_keys=False, allow_unicode=True, width=10**6)


def _read_config(source: Sequence[Assignment]) -> tuple[TrainConfig, list[str]]:
    """Return the settings that can be read, over defaults, and what is wrong with others."""
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
            f"--recipe={name} is not known: {hint}Give one of {', '.join(shipped)}, or the path of a file"
        )
    return shipped[name]


def _settings_of_tree(tree: Any, name: str, source: str) -> list[Assignment]:
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds no settings: write name: value on each line")
    return [replace(each, source=source) for each in _assignments(name, tree, "")]


def is_of_ours(tree: Mapping[str, Any], above: str = "") -> bool:
    """Return whether every key is a setting of training, under a section or not."""
    return all(
        is_of_ours(value, f"{above}{key}.")
        if isinstance(value, dict) and value
        else f"{above}{key}" in sections_of(TrainConfig) or setting_named(f"{above}{key}") is not None
        for key, value in tree.items()
    )


def _assignments(recipe: str, tree: Mapping[str, Any], section: str) -> list[Assignment]:
    """Flatten a mapping; names carry the keys above them."""
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
    """Return a value as YAML's own types, a duration as its text."""
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
