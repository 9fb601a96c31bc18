"""Recipes: files of settings, and the resolved configuration written as one.

A recipe is YAML or JSON, flat (`learning_rate: 3e-4`) or by section (`optimizer: {learning_rate: 3e-4}`), named by its
path or, in this package's recipes folder, by its bare name. Scalars keep the text of the file, and the parser of flags
decides what they mean: YAML alone would take 1e-3 for a string, `on` for a boolean and 010 for eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.assignments import Assignment, Reader
from pretraining.config.fields import sections_of, settings_of, values_of
from pretraining.config.training import TrainConfig
from pretraining.config.values import Raw, did_you_mean, format_value
from pretraining.errors import ConfigError
from pretraining.files import exists, parse_json, read_file
from pretraining.progress import Duration

RECIPE_SUFFIXES = (".yaml", ".yml", ".json")
SHIPPED = Path(__file__).parent / "recipes"

LARGEST_RECIPE_BYTES = 2**20
"""Names and weights of thousands of datasets."""
DEEPEST_YAML = 32
"""Lists and mappings inside each other; settings need two."""
_MOST_VALUES = 2**14
"""As many take the parser a second."""


def shipped_recipes() -> dict[str, Path]:
    """Returns the recipes of this package by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def read_recipe(name: str) -> list[Assignment]:
    """Returns the settings of a recipe, a path or the name of a shipped one, as raw text.

    Raises:
        ConfigError: there is no such recipe, it is not valid YAML or JSON, or it is no mapping of settings.
    """
    path = _find(name)
    try:
        content = read_file(path, LARGEST_RECIPE_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse_recipe(content, name, is_json=path.suffix == ".json")


def parse_recipe(content: str, name: str, is_json: bool = False) -> list[Assignment]:
    """Returns the settings in the content of a recipe as raw text; messages call it by `name`.

    Raises:
        ConfigError: it is not valid, or no mapping of settings.
    """
    try:
        tree = _read_json(content) if is_json else _read_yaml(content)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {name} is not valid {'JSON' if is_json else 'YAML'}: {error}") from error
    if tree is None:
        return []
    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {name} holds no settings: write name: value on each line")
    return _assignments(name, tree, "")


def load_config(path: str | Path) -> TrainConfig:
    """Reads a resolved configuration back, as `dump_config` wrote it, without checking rules again.

    Raises:
        ConfigError: carries every problem of the file.
    """
    config, problems = _read_config(read_recipe(str(path)))
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
        if not exists(Path(name)):
            raise ConfigError(f"--recipe={name}: there is no such file")
        return Path(name)
    shipped = shipped_recipes()
    if name not in shipped:
        hint = did_you_mean(name, shipped, "did you mean {}? ")
        raise ConfigError(
            f"--recipe={name} is not known: {hint}Shipped are {', '.join(shipped)}; a recipe of your own is given by "
            f"its path, ending in {', '.join(RECIPE_SUFFIXES)}"
        )
    return shipped[name]


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


def _read_json(content: str) -> Any:
    """Parses JSON with numbers left as they are written."""
    return parse_json(
        content,
        parse_int=str,
        parse_float=str,
        parse_constant=str,
        object_pairs_hook=lambda pairs: _refuse_repeats(pairs, ""),
    )


def _read_yaml(content: str) -> Any:
    """Parses YAML that may come from anywhere, its scalars as text.

    Raises:
        yaml.YAMLError: it is not valid.
        ValueError: it is too large, nested too deep, or its aliases make too much of it.
    """
    if len(content) > LARGEST_RECIPE_BYTES:
        raise ValueError(f"it has more than {LARGEST_RECIPE_BYTES:,} characters")
    return yaml.load(content, Loader=_TextLoader)


def _refuse_repeats(pairs: list[tuple[str, Any]], place: str) -> dict[str, Any]:
    """Makes a mapping of pairs; a repeated key would silently hide the first."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"{key} stands there twice{place}")
        mapping[key] = value
    return mapping


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars are text, except null."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}  # of nodes whose end was read, with their aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Reads a node; a ValueError where it is nested too deep, or too large once its aliases are written out."""
        self._depth += 1
        if self._depth > DEEPEST_YAML:
            raise ValueError(f"lists and mappings are nested more than {DEEPEST_YAML} deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node not in self._sizes:
            self._sizes[node] = 1 + sum(self._sizes.get(child, 0) for child in _children_of(node))
            if max(self._sizes[node], len(self._sizes)) > _MOST_VALUES:
                raise ValueError(f"with its aliases written out it holds more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping, refusing repeated keys."""
        pairs = [
            (str(self.construct_object(key)), self.construct_object(value, deep=True)) for key, value in node.value
        ]
        return _refuse_repeats(pairs, f" (mapping from line {node.start_mark.line + 1})")


# An empty value, ~ and null are null; everything else stays text.
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)


def _children_of(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return chain.from_iterable(node.value)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


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
