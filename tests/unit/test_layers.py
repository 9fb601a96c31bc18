"""The order of packages: each imports only from rows below, not from siblings; settings need no torch."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT, run_command

# Lowest row first; parts in one row are siblings.
ROWS = (
    ("errors",),
    ("durations",),
    ("files", "progress", "text", "context_group"),
    ("object_store", "best"),
    ("config", "launch"),
    ("estimate",),
    ("model", "data", "distributed"),
    ("optim",),
    ("observability",),
    ("checkpoint", "evaluation"),
    ("train",),
    ("tools",),
    ("api",),
    ("__init__",),
    ("cli", "main_training"),
    ("__main__",),
)
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}
TORCH_FREE = ("errors", "files", "durations", "progress", "text", "object_store", "config", "launch", "estimate")

PACKAGE = ROOT / "pretraining"
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of_file(path: Path) -> str:
    """`pretraining/config/command_line.py` -> config, `pretraining/errors.py` -> errors."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(source: str, package: str, *, with_types: bool = True) -> Iterator[str]:
    """Return the dotted names of all imports, also inside functions; `from a import b` gives `a.b`.

    Args:
        source: Python code.
        package: dotted package of the code, which relative imports start from.
        with_types: whether imports for types alone count.
    """
    tree = ast.parse(source)
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for_types = {inner for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if node in for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def modules_of_file(path: Path, *, with_types: bool = True) -> list[str]:
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return list(imported_modules(path.read_text(encoding="utf-8"), package, with_types=with_types))


def circle_in(modules: Mapping[str, Collection[str]]) -> list[str]:
    """Return modules that import each other in a circle, the first one again at the end; empty if there is none.

    Args:
        modules: names imported by each module: modules, or names in them.
    """
    graph = {
        name: {each for each in modules if each != name and each in prefixes(names)} for name, names in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def prefixes(names: Collection[str]) -> set[str]:
    """Return dotted names and the names of their first parents: of `a.b.c`, also `a.b`."""
    return {*names, *(name.rpartition(".")[0] for name in names)}


def parts_imported(modules: list[str]) -> set[str]:
    """Return the packages of this project among dotted names; `pretraining` itself is its `__init__`."""
    parts = set()
    for name in modules:
        top, *rest = name.split(".")
        if top == "main_training":
            parts.add(top)
        elif top == "pretraining":
            known = bool(rest) and ((PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").exists())
            parts.add(rest[0] if known else "__init__")
    return parts


def violations(part: str, imported: set[str]) -> list[str]:
    """Return the imported packages that this package must not import."""
    return sorted(other for other in imported - {part} if ROW_OF[other] >= ROW_OF[part])


def test_every_part_has_a_row() -> None:
    assert {part_of_file(path) for path in FILES} <= set(ROW_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path: Path) -> None:
    assert violations(part_of_file(path), parts_imported(modules_of_file(path))) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    assert circle_in({name: modules_of_file(path, with_types=False) for path, name in names.items()}) == []
    # The check finds a circle of three, through a name in a module and an import within a function.
    sources = {
        "p.a": "from p.b import f",
        "p.b": "def f():\n import p.c",
        "p.c": "from p.a import g",
        "p.d": "import p.a",
    }
    circle = {name: list(imported_modules(source, "p")) for name, source in sources.items()}
    assert set(circle_in(circle)) == {"p.a", "p.b", "p.c"}


def test_no_two_classes_and_no_two_modules_have_one_name() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    modules = [path.stem for path in FILES if path.stem != "__init__"]
    assert [name for name, count in Counter(classes + modules).items() if count > 1] == []


def test_settings_and_launch_load_no_torch() -> None:
    """Not through another library or the package's `__init__` either, so that `--help` is fast."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if part_of_file(path) in TORCH_FREE
    ]
    program = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""
    run_command([sys.executable, "-c", program, *names])


def test_only_the_composition_root_sees_every_part() -> None:
    seen_by_builder = {*ROWS[3], *ROWS[4], *ROWS[5]}
    see_all = [path for path in FILES if seen_by_builder <= parts_imported(modules_of_file(path))]
    assert set(see_all) <= {PACKAGE / "train" / "build.py"}


def test_package_files_are_docstrings_only() -> None:
    """Names are imported from the modules that define them; only `pretraining` re-exports names."""
    for path in PACKAGE.glob("*/**/__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), path
