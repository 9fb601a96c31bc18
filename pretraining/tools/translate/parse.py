"""Parser of settings files (YAML, JSON, TOML, Python assignments) into one flat mapping, `{dotted key: text}`.

Nothing in a file is executed. Values keep the text of the file; null becomes None, and a list `[a, b]`.
"""

from __future__ import annotations

import ast
import operator
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.values import format_value
from pretraining.errors import ConfigError

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def parse(path: Path) -> dict[str, str | None]:
    """Return the settings of a file by dotted key; raise a ConfigError if it is unreadable, invalid or empty."""
    return flatten(read_tree(path))


def read_tree(path: Path) -> dict[str, Any]:
    """Return the settings of a file as nested mappings; errors as in `parse`."""
    content = read_text(path, str(path))
    tree: Any
    if path.suffix not in (".py", ".toml"):
        tree = parse_tree(content, str(path), path.suffix)
    else:
        try:
            tree = read_assignments(content) if path.suffix == ".py" else tomllib.loads(content, parse_float=str)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path} has no settings")
    return tree


def flatten(tree: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the values of nested mappings by dotted key; an empty mapping is null."""
    return dict(_flatten(tree, ""))


def _flatten(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, str | None]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", text_of(value)


def text_of(value: Any) -> str | None:
    """Return a value as a file shows it; None for null."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(text_of(item) or 'none' for item in value)}]"
    return None if value is None or value == {} else format_value(value)


def read_assignments(content: str) -> dict[str, Any]:
    """Return the assignments of a Python file: literals, arithmetic, and names assigned before.

    Raises:
        ValueError: another kind of statement; the message names the line.
        SyntaxError: the content is not Python.
    """
    names: dict[str, Any] = {}
    for statement in ast.parse(content).body:
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                continue
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                try:
                    names[name] = _evaluate(value, names)
                except (ValueError, ArithmeticError) as error:
                    raise ValueError(f"line {statement.lineno}: {error}") from None
            case _:
                raise ValueError(f"line {statement.lineno} is not an assignment: write name = value")
    return names


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return f"[{', '.join(format_value(_evaluate(item, names)) for item in items)}]"
        case ast.JoinedStr(values=parts):
            plain = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
            return "".join(str(_evaluate(part, names)) for part in plain)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, names)
        case ast.BinOp(left=left, op=symbol, right=right) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_number(left, names), _number(right, names))
    raise ValueError(f"`{ast.unparse(node)[:60]}` is not a plain value, and code is not run: write the value")


def _number(node: ast.expr, names: Mapping[str, Any]) -> int | float:
    value = _evaluate(node, names)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{ast.unparse(node)[:60]}` is not a number")
    return value
