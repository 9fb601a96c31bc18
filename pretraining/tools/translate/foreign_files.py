"""Reader of settings files (YAML, JSON, Python assignments) into one flat mapping, `{dotted key: text}`.

Nothing in a file is executed. Values keep the text of the file; null becomes None, and a list `[a, b]`. A file with
`defaults:` is composed of other files:

    conf/config.yaml            defaults: [optimizer: adamw, model: small, train, logging]
    conf/optimizer/adamw.yaml   goes to the section `optimizer`; optimizer=sgdm selects conf/optimizer/sgdm.yaml
    conf/train.yaml             goes to the section `train`, whether or not its lines stand under `train:`

Later files win. The main file's own lines are merged at `_self_`, or last.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pretraining.config.assignments import setting_named
from pretraining.config.settings_files import parse_tree, read_text
from pretraining.config.values import format_value
from pretraining.errors import ConfigError
from pretraining.files import is_file
from pretraining.tools.translate.engine import KeyValue

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def read_settings(path: Path) -> dict[str, str | None]:
    """Return the settings of a file by dotted key; raise a ConfigError if it is unreadable or invalid."""
    return dict(_flatten(_read_tree(path), ""))


def _read_tree(path: Path) -> dict[str, Any]:
    content = read_text(path, str(path))
    if path.suffix == ".py":
        try:
            tree: Any = _read_assignments(content)
        except (SyntaxError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    else:
        tree = parse_tree(content, str(path), path.suffix)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path} has no names of settings: write `name: value` on each line")
    return tree or {}


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


# Composed files


def compose(path: Path, name: str, typed: Mapping[str, str | None]) -> tuple[list[KeyValue], set[str]]:
    """Return the merged settings of a main file and the files in its `defaults:`, and the typed words that chose files.

    A typed word chooses the file of a group, unless it is a setting of this project and there is no such file.

    Args:
        name: name of the main file in messages.

    Raises:
        ConfigError: a missing or invalid file, or an entry of `defaults:` in another form.
    """
    tree, folder, merged, used = _read_tree(path), path.parent, dict[str, KeyValue](), set[str]()
    entries = tree.pop("defaults") or []
    entries = entries if isinstance(entries, list) else [entries]
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        match [*entry.items()] if isinstance(entry, dict) else entry:
            case "_self_":
                added = [KeyValue(key, text, name) for key, text in _flatten(tree, "")]
            case str(section):
                added = _read_section(folder / section, section.removesuffix(".yaml"))
            case [(group, str() | None as chosen)]:
                word = typed.get(group)
                if word is not None and (setting_named(group) is None or is_file(folder / group / f"{word}.yaml")):
                    chosen = word
                    used.add(group)
                added = [] if chosen is None else _read_section(folder / group / chosen, group)
                if group == "optimizer" and chosen and all(given.key != "optimizer.name" for given in added):
                    added.append(KeyValue("optimizer.name", chosen, added[0].file if added else name))
            case _:
                raise ConfigError(f"{path}: defaults: {entry}: write `- group: name` or `- name`")
        merged |= {given.key: given for given in added}
    return list(merged.values()), used


def _read_section(path: Path, section: str) -> list[KeyValue]:
    """Return the settings of a file that is a section, whether or not its lines stand under the section's name."""
    file = f"{str(path).removesuffix('.yaml')}.yaml"
    settings = dict(_flatten(_read_tree(Path(file)), ""))
    above = "" if any(key.partition(".")[0] == section for key in settings) else f"{section}."
    return [KeyValue(f"{above}{key}", text, file) for key, text in settings.items()]


# Python


def _read_assignments(content: str) -> dict[str, Any]:
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
