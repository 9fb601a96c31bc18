"""Dockerfile: what it copies is there, and what is the user's alone stays out. Nothing is built here."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from helpers import ROOT

FILE = ROOT / "scripts" / "Dockerfile"
IGNORED = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()


def is_ignored(path: str) -> bool:
    """Whether a file of the repository stays out of the build."""
    parents = [path, *(str(parent) for parent in Path(path).parents)]
    patterns = [pattern for pattern in IGNORED if pattern and not pattern.startswith("#")]
    return any(
        fnmatch(each, pattern) or fnmatch(Path(each).name, pattern.removeprefix("**/"))
        for each in parents
        for pattern in patterns
    )


def test_what_is_copied_is_there_and_what_is_the_users_alone_is_not_copied() -> None:
    copied = [line.split()[1] for line in FILE.read_text().splitlines() if line.startswith("COPY")]
    assert len(copied) > 1
    assert [source for source in copied if not (ROOT / source).exists() or is_ignored(source)] == []
    assert all(map(is_ignored, [".venv", ".git/config", "runs/x", "data/demo"]))
    assert not any(map(is_ignored, ["main_training.py", "pretraining/config/recipes/demo.yaml", "tests"]))
