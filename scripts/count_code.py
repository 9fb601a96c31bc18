"""Count files, lines of code and docstrings of the package.

    python scripts/count_code.py            a line per part
    python scripts/count_code.py --files    a line per file

A line of code is neither blank, nor a comment, nor part of a docstring. ruff formats the code, so the number does not
depend on taste.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pretraining"


@dataclass(frozen=True)
class Count:
    """Lines of code and lines of docstrings in a file."""

    code: int
    docstrings: int


def count(path: Path) -> Count:
    """Count the lines of a Python file."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in documented)
    return Count(sum(1 for line in lines if line and not line.startswith("#")), len(documented))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print a line per file instead of a line per part")
    by_file = parser.parse_args().files
    parts: dict[str, list[Count]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        parts[str(inside) if by_file else inside.parts[0]].append(count(path))
    everything = [each for counts in parts.values() for each in counts]
    training = [each for name, counts in parts.items() if not name.startswith("tools") for each in counts]
    rows = [*sorted(parts.items()), ("all but tools", training), ("all", everything)]
    print(f"{'':40} {'files':>6} {'code':>7} {'docstrings':>11}")
    for name, counts in rows:
        code, docstrings = sum(each.code for each in counts), sum(each.docstrings for each in counts)
        print(f"{name:40} {len(counts):6} {code:7,} {docstrings / max(code, 1):11.0%}")


if __name__ == "__main__":
    main()
