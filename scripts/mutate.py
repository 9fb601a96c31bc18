"""Mutation test: make small changes to the core, one at a time, and report which of them the tests catch.

    python scripts/mutate.py                          60 changes, ten in each part; some minutes per part
    python scripts/mutate.py --parts=optim,train --each=5 --seed=2
    python scripts/mutate.py --list                   the changes, without running a test

A change flips a comparison, drops a statement, or changes a constant. The same code and seed give the same changes. A
change is caught if a test of its part fails or times out. The script works in a copy of the repository.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("train", "checkpoint", "data", "distributed", "optim", "config")
SECONDS_PER_CHANGE = 900

FLIPPED: dict[type[ast.cmpop], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}


@dataclass(frozen=True)
class Change:
    """A replacement of the text of a file from `begin` to `end`."""

    path: Path
    line: int
    begin: int
    end: int
    new: str

    def apply(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]

    def describe(self, root: Path) -> str:
        old = (root / self.path).read_bytes()[self.begin : self.end].decode()
        return f"{self.path}:{self.line}: {' '.join(old.split())[:60]} -> {self.new}"


def changes_of(path: Path, root: Path = ROOT) -> list[Change]:
    """Return all possible changes of a file, in the order of the lines."""
    text = (root / path).read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def change(node: ast.expr | ast.stmt, new: str) -> Change:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Change(path, node.lineno, begin, end, new)

    found = []
    for node in _mutable_nodes(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            found.append(change(node, f"({left} {FLIPPED[type(node.ops[0])]} {right})"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            found.append(change(node, str(not node.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            found.append(change(node, str(node.value + 1)))
        elif isinstance(node, ast.AugAssign | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            found.append(change(node, "pass"))
    return found


def _mutable_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that affect behavior: no types, decorators, messages or f-strings."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_message = isinstance(child, ast.Expr) and ast.unparse(child).startswith(("log.", "yield"))
            if isinstance(child, ast.AST) and not is_message and not isinstance(child, ast.JoinedStr):
                yield from _mutable_nodes(child)


def draw(parts: Sequence[str], each: int, seed: int) -> dict[str, list[Change]]:
    """Return the changes of each part."""
    drawn = {}
    for part in parts:
        files = sorted((ROOT / "pretraining" / part).rglob("*.py"))
        possible = [change for file in files for change in changes_of(file.relative_to(ROOT))]
        drawn[part] = random.Random(f"{seed} {part}").sample(possible, min(each, len(possible)))
    return drawn


def copy_repository(folder: Path) -> None:
    """Copy the files that git tracks."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def is_caught(folder: Path, part: str, workers: str) -> bool:
    """Run the tests of a part until the first failure; return whether there was one."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", workers]
    try:
        done = subprocess.run(
            [*command, f"tests/unit/{part}"], cwd=folder, capture_output=True, timeout=SECONDS_PER_CHANGE
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma list (default %(default)s)")
    parser.add_argument("--each", type=int, default=10, help="changes in each part (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", default="2", help="processes of pytest (default %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the changes and run no test")
    flags = parser.parse_args()
    drawn = draw(flags.parts.split(","), flags.each, flags.seed)
    if flags.list:
        print("\n".join(change.describe(ROOT) for changes in drawn.values() for change in changes))
        return
    caught = dict.fromkeys(drawn, 0)
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        folder = Path(name)
        copy_repository(folder)
        for part, changes in drawn.items():
            if is_caught(folder, part, flags.workers):
                sys.exit(f"the tests of {part} fail without any change: see `pytest tests/unit/{part}`")
            for change in changes:
                text = (folder / change.path).read_bytes()
                (folder / change.path).write_bytes(change.apply(text))
                found = is_caught(folder, part, flags.workers)
                (folder / change.path).write_bytes(text)
                caught[part] += found
                print(f"{'caught' if found else 'MISSED'}  {change.describe(ROOT)}", flush=True)
            print(f"{part}: {caught[part]} of {len(changes)}", flush=True)
    print(f"all: {sum(caught.values())} of {sum(map(len, drawn.values()))}")


if __name__ == "__main__":
    main()
