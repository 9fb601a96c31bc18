"""Files of settings as trees: YAML and JSON.

Scalars keep the text of the file, and the parser of flags decides what they mean: YAML alone would take 1e-3 for a
string, `on` for a boolean and 010 for eight. Nothing in a file is executed, and no file takes longer than a second.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import parse_json, read_file

LARGEST_FILE_BYTES = 2**20
"""Names and weights of thousands of datasets."""
_MOST_VALUES = 2**14
"""As many take the parser a second."""


def read_text(path: Path, name: str) -> str:
    """Return the content of a file of settings, which messages call `name`, without a byte order mark.

    Raises:
        ConfigError: it cannot be read, is too large, or is no UTF-8.
    """
    try:
        return read_file(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_tree(content: str, name: str, suffix: str = ".yaml") -> Any:
    """Return what a file of settings holds: mappings, lists, and texts or None for what has no parts.

    Args:
        name: what messages call the file.
        suffix: .json is JSON; everything else is YAML.

    Raises:
        ConfigError: it is not valid.
    """
    is_json = suffix == ".json"
    try:
        return read_json(content) if is_json else read_yaml(content)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {name} is not valid {'JSON' if is_json else 'YAML'}: {error}") from error


def read_json(content: str) -> Any:
    """Parse JSON that may come from anywhere, its scalars as text; a ValueError if it is not valid."""
    hooks = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), str)
    return _as_texts(parse_json(content, object_pairs_hook=_mapping_of, **hooks))


def read_yaml(content: str) -> Any:
    """Parse YAML that may come from anywhere, its scalars as text.

    Raises:
        yaml.YAMLError: it is not valid, or would build an object.
        ValueError: it is too large, nested too deep, or its aliases make too much of it.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"it has more than {LARGEST_FILE_BYTES:,} characters")
    try:
        return _as_texts(yaml.load(content, Loader=_TextLoader))
    except RecursionError:
        raise ValueError("lists and mappings are nested too deep") from None


def _mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of pairs; a repeated key would silently hide the first."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands there twice")
    return mapping


class _TextLoader(yaml.SafeLoader):
    """YAML whose scalars are text, except null."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}  # of nodes whose end was read, with their aliases written out

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read a node; a ValueError if a key is no name, or it is too large once its aliases are written out."""
        node: yaml.Node | None = super().compose_node(parent, index)
        if node is not None and node not in self._sizes:
            children: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                _mapping_of([(_name_of(key), value) for key, value in node.value])
                children = list(chain.from_iterable(node.value))
            self._sizes[node] = size = 1 + sum(self._sizes.get(child, 0) for child in children)
            if max(size, len(self._sizes)) > _MOST_VALUES:
                raise ValueError(f"with its aliases written out it holds more than {_MOST_VALUES:,} values")
        return node


def _name_of(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):  # the text of nested ones doubles with each level
        raise ValueError(f"line {key.start_mark.line + 1}: a list or a mapping is no name of a setting")
    return str(key.value)


# An empty value, ~ and null are null; everything else stays text, and no tag makes anything else of it.
_TextLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.endswith((":null", ":str", ":seq", ":map"))
}
_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])


def _as_texts(value: Any) -> Any:
    """Return a tree with its scalars as texts, None left as it is."""
    if isinstance(value, dict):
        return {str(key): _as_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_texts(item) for item in value]
    return None if value is None else format_value(value)
