"""Dockerfile: what it copies and runs is there, and its steps keep images small and safe. Nothing is built here."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers import ROOT, run_command
from stand_in import StandIn

FILE = ROOT / "scripts" / "Dockerfile"
IGNORED = FILE.with_name("Dockerfile.dockerignore").read_text().splitlines()


@dataclass(frozen=True)
class Step:
    """An instruction and its arguments, lines joined."""

    name: str
    text: str


def steps_of(text: str) -> list[Step]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in lines.splitlines() if line]


STEPS = steps_of(FILE.read_text())


def all_of(name: str) -> list[str]:
    return [step.text for step in STEPS if step.name == name]


def is_ignored(path: str) -> bool:
    """Whether a file of the repository stays out of the build."""
    parents = [path, *(str(parent) for parent in Path(path).parents)]
    patterns = [pattern for pattern in IGNORED if pattern and not pattern.startswith("#")]
    return any(
        fnmatch(each, pattern) or fnmatch(Path(each).name, pattern.removeprefix("**/"))
        for each in parents
        for pattern in patterns
    )


def test_the_first_steps_copy_what_is_there_and_all_that_the_set_up_needs(tmp_path: Path) -> None:
    """And what is copied after it does not make the set-up do its work again."""
    stand_in = StandIn(tmp_path)
    repository = stand_in.root / "repository"
    *first, whole = all_of("COPY")
    assert whole == ". ."
    for line in first:
        source, target = line.split()
        assert (ROOT / source).is_file() and not is_ignored(source)
        (repository / target).mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, repository / target)
    run_command(["bash", repository / "scripts" / "setup.sh"], stand_in.variables())
    installed = stand_in.all_calls()
    assert len(installed) > 0
    shutil.copytree(ROOT / "scripts", repository / "scripts", dirs_exist_ok=True)
    run_command(["bash", repository / "scripts" / "setup.sh"], stand_in.variables())
    assert stand_in.all_calls() == installed


@pytest.mark.parametrize(
    "name", ["main_training.py", "scripts/train.sh", "pretraining/config/recipes/demo.yaml", "tests"]
)
def test_what_an_image_needs_is_part_of_the_build(name: str) -> None:
    assert (ROOT / name).exists() and not is_ignored(name)


@pytest.mark.parametrize("name", [".venv", ".git/config", "runs/x", "pretraining/__pycache__/x.pyc", "data/demo"])
def test_what_it_must_not_have_is_not(name: str) -> None:
    assert is_ignored(name)


def test_it_is_made_by_the_two_commands() -> None:
    named = re.findall(r"bash (scripts/\w+\.sh)", " ".join(all_of("RUN")))
    assert named == ["scripts/setup.sh", "scripts/test.sh"]
    assert all((ROOT / name).is_file() for name in named)


def test_signals_reach_the_script() -> None:
    (entry,) = all_of("ENTRYPOINT")
    assert json.loads(entry) == ["tini", "--", "bash", "scripts/train.sh"]  # a list: no shell in between
    assert "tini" in all_of("RUN")[0]
    assert all_of("CMD") == []


def test_the_image_that_is_made_by_default_trains_and_runs_as_nobody_in_particular() -> None:
    last = STEPS[len(STEPS) - 1 - [step.name for step in reversed(STEPS)].index("FROM") :]
    assert [(step.name, step.text) for step in last] == [("FROM", "training"), ("USER", "trainer")]


def test_the_base_is_the_users_choice_and_by_default_a_python_that_is_supported() -> None:
    assert STEPS[0].name == "ARG" and STEPS[1] == Step("FROM", "${BASE} AS training")
    found = re.fullmatch(r"BASE=python:3\.(\d+)-slim", STEPS[0].text)
    assert found is not None and 11 <= int(found[1]) <= 13


def test_steps_leave_nothing_behind_that_training_does_not_need() -> None:
    for step in all_of("RUN"):
        if "apt-get install" in step:
            assert "--no-install-recommends" in step and "--yes" in step and "rm -rf /var/lib/apt/lists/*" in step
        if "setup.sh" in step or "test.sh" in step:
            assert "PIP_NO_CACHE_DIR=1" in step
    assert all_of("ADD") == [] and not any("sudo" in step for step in all_of("RUN"))
