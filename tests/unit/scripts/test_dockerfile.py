"""Dockerfile: what it copies and runs is there, and its steps keep images small and safe. Nothing is built here."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

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


def test_signals_reach_the_script_which_runs_as_nobody_in_particular() -> None:
    (entry,) = all_of("ENTRYPOINT")
    assert json.loads(entry) == ["tini", "--", "bash", "scripts/train.sh"]  # a list: no shell in between
    assert STEPS[-2:] == [Step("FROM", "training"), Step("USER", "trainer")]


def test_what_is_the_users_alone_stays_out_of_the_image() -> None:
    assert all(map(is_ignored, [".venv", ".git/config", "runs/x", "data/demo"]))
    assert not any(map(is_ignored, ["main_training.py", "pretraining/config/recipes/demo.yaml", "tests"]))
