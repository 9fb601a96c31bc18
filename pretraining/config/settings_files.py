"""Reader of settings files, YAML and JSON, into trees.

Scalars stay text, which the parser of flags interprets: YAML would read 1e-3 as a string, `on` as a boolean and 010 as
eight. Nothing in a file is executed, and limits keep parsing below a second.
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
"""Room for names and weights of thousands of datasets."""
_MOST_VALUES = 2**14
"""A file of this size takes the parser a second."""


_NUMBERS_AS_TEXT = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), str)


def read_text(path: Path, name: str) -> str:
    """Return the text of a settings file, without a byte order mark; `name` is its name in messages.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        return read_file(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_tree(content: str, name: str, suffix: str = ".yaml") -> Any:
    """Parse the content of a settings file into mappings and lists, with text or None as leaves.

    Args:
        content: text of the file.
        name: name of the file in messages.
        suffix: .json for JSON; YAML otherwise.

    Raises:
        ConfigError: the content is malformed.
    """
    is_json = suffix == ".json"
    try:
        if is_json:
            return _as_texts(parse_json(content, object_pairs_hook=_mapping_of, **_NUMBERS_AS_TEXT))
        return read_yaml(content)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {name} is not valid {'JSON' if is_json else 'YAML'}: {error}") from error


def read_yaml(content: str) -> Any:
    """Parse untrusted YAML with scalars as text.

    Raises:
        yaml.YAMLError: the content is malformed, or would build an object.
        ValueError: the content is too large or nested too deep, also after its aliases are expanded.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"it has more than {LARGEST_FILE_BYTES:,} characters")
    try:
        return _as_texts(yaml.load(content, Loader=_TextLoader))
    except RecursionError:
        raise ValueError("lists and mappings are nested too deep") from None


def _mapping_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a mapping; a ValueError for a repeated key, which would silently hide the first."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    return mapping


class _TextLoader(yaml.SafeLoader):
    """YAML loader that keeps scalars as text, except null."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}  # values in each complete node, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Read a node; a ValueError if a key is a list or mapping, or the node with expanded aliases is too large."""
        node: yaml.Node | None = super().compose_node(parent, index)
        if node is not None and node not in self._sizes:
            children: list[yaml.Node] = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                _mapping_of([(_name_of(key), value) for key, value in node.value])
                children = list(chain.from_iterable(node.value))
            self._sizes[node] = size = 1 + sum(self._sizes.get(child, 0) for child in children)
            if max(size, len(self._sizes)) > _MOST_VALUES:
                raise ValueError(f"with its aliases expanded it holds more than {_MOST_VALUES:,} values")
        return node


def _name_of(key: yaml.Node) -> str:
    if not isinstance(key, yaml.ScalarNode):  # the text of nested keys would double with each level
        raise ValueError(f"line {key.start_mark.line + 1}: a list or a mapping cannot name a setting")
    return str(key.value)


# An empty value, ~ and null are null. Everything else stays text, whatever its tag.
_TextLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.endswith((":null", ":str", ":seq", ":map"))
}
_TextLoader.yaml_implicit_resolvers = {}
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])


def _as_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_texts(item) for item in value]
    return None if value is None else format_value(value)
