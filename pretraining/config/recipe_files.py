"""Recipes: settings files to read, and the resolved configuration to write.

A recipe is YAML or JSON, flat (`learning_rate: 3e-4`) or by section (`optimizer: {learning_rate: 3e-4}`), given by path
or by the name of a recipe in this package.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.assignments import Assignment, Reader, Source
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, expand_home, format_value
from pretraining.durations import Duration
from pretraining.errors import ConfigError
from pretraining.files import exists, real_path

RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
SHIPPED = Path(__file__).parent / "recipes"


RUN_CONFIG_FILE = "config.yaml"
_BESIDE = ("checkpoints", "run_status.json")  # as in checkpoint/run_folder.py and train/run_status.py


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes of this package by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def read_recipe(name: str) -> list[Assignment]:
    """Read a recipe by its path or shipped name.

    Raises:
        ConfigError: the recipe does not exist, or is malformed.
    """
    path = find_recipe(name)
    given = _settings_of_tree(parse_tree(read_text(path, name), name, path.suffix), name)
    is_recorded = path.name == RUN_CONFIG_FILE and any(exists(path.parent / other) for other in _BESIDE)
    is_whole = any(assignment.name == "checkpoint.ckpt_save_path" for assignment in given)
    source = Source(f"recipe {name}", real_path(path.parent) if is_recorded and is_whole else None)
    return [replace(assignment, source=source, is_typed=not is_recorded) for assignment in given]


def parse_recipe(content: str, name: str) -> list[Assignment]:
    """Return the settings that a run recorded as raw text; `name` is the record's name in messages.

    Raises:
        ConfigError: the content is malformed.
    """
    settings = _settings_of_tree(parse_tree(content, name), name)
    return [replace(assignment, source=Source(name), is_typed=False) for assignment in settings]


def load_config(path: Path) -> TrainConfig:
    """Read a configuration that `dump_config` wrote; raises as `settings_in`, and if the file cannot be read."""
    return settings_in(read_text(path, str(path)), str(path))


def settings_in(content: str, name: str) -> TrainConfig:
    """Read the configuration in a checkpoint; `name` is its name in messages.

    Settings that this version does not know or would refuse, because another version wrote them, keep their defaults.

    Raises:
        ConfigError: the content is malformed.
    """
    reader = Reader(TrainConfig)
    reader.read(parse_recipe(content, name))
    config = reader.build()
    assert config is not None  # every setting of training has a default
    return config


def dump_config(config: Any, names: Container[str] | None = None) -> str:
    """Return settings of a root as YAML by sections, which `settings_in` reads back equal; None = all settings."""
    tree: dict[str, Any] = {}
    values = values_of(config)
    for name, setting in settings_of(type(config)).items():
        if names is None or name in names:
            target = tree.setdefault(setting.section, {}) if setting.section else tree
            target[name] = _to_yaml_type(values[name])
    return yaml.dump(tree, Dumper=_FlowListDumper, sort_keys=False, allow_unicode=True, width=10**6)


def find_recipe(name: str, suffixes: tuple[str, ...] = RECIPE_SUFFIXES) -> Path:
    """Return the path of a recipe, given by path or shipped name; raise a ConfigError for an unknown name."""
    if name.endswith(suffixes):
        try:
            return Path(expand_home(name))
        except ValueError as error:
            raise ConfigError(f"--recipe={name}: {error}") from None
    shipped = shipped_recipes()
    if name not in shipped:
        hint = did_you_mean(name, shipped, "did you mean {}? ")
        raise ConfigError(
            f"--recipe={name} is not known: {hint}Give one of {', '.join(shipped)}, or the path of a file, "
            f"{', '.join(suffixes)}"
        )
    return shipped[name]


def _settings_of_tree(tree: Any, name: str) -> list[Assignment]:
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds no settings: write one name: value per line")
    return _assignments(name, tree, "")


def _assignments(recipe: str, tree: Mapping[str, Any], section: str) -> list[Assignment]:
    """Flatten a mapping; names are prefixed with the keys above them."""
    assignments = []
    for key, value in tree.items():
        if isinstance(value, dict):
            assignments += _assignments(recipe, value, f"{section}{key}.")
        elif value is not None or section or key not in sections_of(TrainConfig):  # a section may be empty
            assignments.append(_assignment(recipe, f"{section}{key}", value))
    return assignments


def _assignment(recipe: str, name: str, value: Any) -> Assignment:
    raw: Raw
    if isinstance(value, list):
        if any(isinstance(item, (dict, list)) for item in value):
            raise ConfigError(f"{recipe}: {name}: a list holds plain values, not lists or mappings")
        raw = [format_value(item) for item in value]
        text = f"[{', '.join(raw)}]"
    else:
        raw = None if value is None else format_value(value)
        text = "null" if raw is None else raw
    return Assignment(name, raw, where=f"{recipe}: {name}: {text}", flag=f"{recipe}: {name}")


def _to_yaml_type(value: Any) -> Any:
    if isinstance(value, Duration):
        return value.amount if value.unit == "steps" else str(value)
    return list(value) if isinstance(value, tuple) else value


class _FlowListDumper(yaml.SafeDumper):
    """YAML writer that puts each list on one line."""


_FlowListDumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
# Double quotes escape Unicode's line breaks, which YAML would not read back otherwise.
_FlowListDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None
    ),
)
