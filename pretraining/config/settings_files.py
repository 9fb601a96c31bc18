"""Files of settings as trees: YAML and JSON.

Scalars keep the text of the file, and the parser of flags decides what they mean: YAML alone would take 1e-3 for a
string, `on` for a boolean and 010 for eight. Nothing in a file is executed, and no file takes longer than a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import parse_json, read_file

LARGEST_FILE_BYTES = 2**20
"""Names and weights of thousands of datasets."""
DEEPEST_YAML = 32
"""Lists and mappings inside each other; settings need two."""
_MOST_VALUES = 2**14
"""As many take the parser a second."""
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float", "seq", "map"))


def read_text(path: Path, name: str) -> str:
    """Returns the content of a file of settings, which messages call `name`, without a byte order mark.

    Raises:
        ConfigError: it cannot be read, is too large, or is no UTF-8.
    """
    try:
        return read_file(path, LARGEST_FILE_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse_tree(content: str, name: str, suffix: str = ".yaml") -> Any:
    """Returns what a file of settings holds: mappings, lists, and texts or None for what has no parts.

    Args:
        name: what messages call the file.
        suffix: .json is JSON; everything else is YAML.

    Raises:
        ConfigError: it is not valid.
    """
    read, language = (read_json, "JSON") if suffix == ".json" else (read_yaml, "YAML")
    try:
        return read(content)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {name} is not valid {language}: {error}") from error
    except (RecursionError, MemoryError):
        raise ConfigError(f"recipe {name} is nested too deep") from None


def read_json(content: str) -> Any:
    """Parses JSON with numbers left as they are written, and true and false as texts."""
    return _as_texts(
        parse_json(
            content,
            parse_int=str,
            parse_float=str,
            parse_constant=str,
            object_pairs_hook=lambda pairs: _refuse_repeats(pairs, ""),
        )
    )


def read_yaml(content: str) -> Any:
    """Parses YAML that may come from anywhere, its scalars as text.

    Raises:
        yaml.YAMLError: it is not valid.
        ValueError: it is too large, nested too deep, or its aliases make too much of it.
    """
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"it has more than {LARGEST_FILE_BYTES:,} characters")
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
        if node is not None and not node.tag.startswith(_PLAIN_TAGS):
            raise ValueError(f"line {node.start_mark.line + 1}: {node.tag} would build an object; write plain values")
        self._depth -= 1
        if node is not None and node not in self._sizes:
            self._sizes[node] = 1 + sum(self._sizes.get(child, 0) for child in _children_of(node))
            if max(self._sizes[node], len(self._sizes)) > _MOST_VALUES:
                raise ValueError(f"with its aliases written out it holds more than {_MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping, refusing repeated keys; those of `<<: *other` stand beneath its own."""
        place = f" (mapping from line {node.start_mark.line + 1})"
        merged: dict[Any, Any] = {}
        pairs = []
        for key, value in node.value:
            if _is_merge(key):
                mappings = value.value if isinstance(value, yaml.SequenceNode) else [value]
                if not all(isinstance(each, yaml.MappingNode) for each in mappings):
                    raise ValueError(f"<< takes a mapping, or a list of them{place}")
                for each in reversed(mappings):  # the first one counts most
                    merged |= self.construct_mapping(each, deep=True)
            elif not isinstance(key, yaml.ScalarNode):  # the text of nested ones doubles with each level
                raise ValueError(f"line {key.start_mark.line + 1}: a list or a mapping is no name of a setting")
            else:
                pairs.append((str(self.construct_object(key)), self.construct_object(value, deep=True)))
        return merged | _refuse_repeats(pairs, place)


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.style is None


# An empty value, ~ and null are null; everything else stays text.
_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_constructor("tag:yaml.org,2002:null", lambda loader, node: None)


def _children_of(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return chain.from_iterable(node.value)
    return node.value if isinstance(node, yaml.SequenceNode) else ()


def _as_texts(value: Any) -> Any:
    """Returns a tree with its scalars as texts, None left as it is."""
    if isinstance(value, dict):
        return {str(key): _as_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_texts(item) for item in value]
    return None if value is None else format_value(value)
