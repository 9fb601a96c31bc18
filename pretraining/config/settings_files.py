"""Files of settings as trees: YAML, JSON, TOML, and Python files of assignments.

Scalars keep the text of the file, and the parser of flags decides what they mean: YAML alone would take 1e-3 for a
string, `on` for a boolean and 010 for eight. Nothing in a file is executed, and no file takes longer than a second.
"""

from __future__ import annotations

import ast
import operator
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
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
        suffix: .json, .toml and .py say what the content is; everything else is YAML.

    Raises:
        ConfigError: it is not valid.
    """
    read, language = _READERS.get(suffix, (read_yaml, "YAML"))
    try:
        return read(content)
    except (yaml.YAMLError, SyntaxError, ValueError) as error:
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


def read_toml(content: str) -> Any:
    """Parses TOML, its values as the text that a flag would have."""
    return _as_texts(tomllib.loads(content, parse_float=str))


def read_python(content: str) -> Any:
    """Reads the assignments of a Python file without running it.

    Values are literals, arithmetic of literals and of names that the file has assigned before, and texts put together
    of these. Imports are passed over: what needs one is no literal.

    Raises:
        ValueError: a line holds anything else; the message names it.
        SyntaxError: it is no Python.
    """
    names: dict[str, Any] = {}
    targets: Sequence[ast.expr]
    for statement in ast.parse(content).body:
        if isinstance(statement, ast.AnnAssign):
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        elif isinstance(statement, ast.Import):
            continue
        else:
            raise ValueError(f"line {statement.lineno} is no assignment: write name = value; nothing else is read")
        for target in targets:
            if not isinstance(target, ast.Name):
                raise ValueError(f"line {statement.lineno} assigns to no plain name: write name = value")
            if value is not None:
                names[target.id] = _evaluate(value, names)
    count = _count_values(names, {})
    if count > _MOST_VALUES:
        raise ValueError(f"with its names written out it holds more than {_MOST_VALUES:,} values")
    return _as_texts(names)


def _count_values(value: Any, counted: dict[int, int]) -> int:
    """Counts the values in a tree whose parts may be the same object many times, each of which is looked at once."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in counted:
        children = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count_values(child, counted) for child in children)
    return counted[id(value)]


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST_NUMBER = 10**30
"""No setting is larger; without a bound, powers of powers would never end."""
_LONGEST_TEXT = 2**14
"""Of texts that are put together; without a bound, twice the text of the line before would fill the memory."""


def _evaluate(node: ast.expr, names: dict[str, Any]) -> Any:
    """Returns the value of an expression of literals.

    Raises:
        ValueError: it holds anything else, or a number that no setting has.
    """
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, names) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(filter(None, keys), values, strict=True)
            return {str(_evaluate(key, names)): _evaluate(value, names) for key, value in pairs}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            number = _number(node, _evaluate(operand, names))
            return -number if isinstance(sign, ast.USub) else number
        case ast.JoinedStr(values=parts):
            return _text(node, "".join(_part_of_text(part, names) for part in parts))
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            a, b = _evaluate(left, names), _evaluate(right, names)
            if isinstance(symbol, ast.Add) and isinstance(a, str) and isinstance(b, str):
                return _text(node, a + b)
            a, b = _number(left, a), _number(right, b)
            if isinstance(symbol, ast.Pow) and abs(b) > 100:
                raise ValueError(f"line {node.lineno}: the power is too large for a setting")
            try:
                result = _OPERATORS[type(symbol)](a, b)
            except ArithmeticError as error:
                raise ValueError(f"line {node.lineno}: {error}") from None
            return _number(node, result)
    raise ValueError(
        f"line {node.lineno}: `{ast.unparse(node)[:60]}` is neither a literal nor arithmetic of literals; files of "
        "settings are read, never run"
    )


def _part_of_text(part: ast.expr, names: dict[str, Any]) -> str:
    """Returns a part of an f-string; a ValueError where it is formatted, or no plain value."""
    if isinstance(part, ast.FormattedValue) and part.conversion == -1 and part.format_spec is None:
        part = part.value
    value = _evaluate(part, names)
    if isinstance(value, (dict, list)):
        raise ValueError(f"line {part.lineno}: `{ast.unparse(part)[:60]}` is no plain value to write into a text")
    return str(value)


def _text(node: ast.expr, text: str) -> str:
    """Returns a text that was put together; a ValueError where it is longer than any setting."""
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"line {node.lineno}: the text is too long for a setting")
    return text


def _number(node: ast.expr, value: Any) -> int | float:
    """Returns a number as it is; a ValueError where it is none, or beyond all settings."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"line {node.lineno}: `{ast.unparse(node)[:60]}` is no number to calculate with")
    if not abs(value) < _LARGEST_NUMBER:
        raise ValueError(f"line {node.lineno}: the number is too large for a setting")
    return value


def _as_texts(value: Any) -> Any:
    """Returns a tree with its scalars as texts, None left as it is."""
    if isinstance(value, dict):
        return {str(key): _as_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_texts(item) for item in value]
    return None if value is None else format_value(value)


_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    ".json": (read_json, "JSON"),
    ".toml": (read_toml, "TOML"),
    ".py": (read_python, "Python of assignments"),
}
