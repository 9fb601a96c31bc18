"""Documentation is checked like code: files, links, flags and commands that it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers import ROOT

import pretraining
from pretraining.cli import COMMANDS
from pretraining.config.assignments import ALIASES
from pretraining.config.fields import settings_of
from pretraining.tools.translate.systems import SYSTEMS

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)

LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|sh|slurm|md|yaml|toml))`")
FLAG = re.compile(r"--([a-z][\w-]*)")
BLOCK = re.compile(r"```(?:bash|sh)?\n(.*?)```", re.DOTALL)

OTHER_PROGRAMS = """
    temp model model_args tasks include_path no-deps standalone nproc-per-node nnodes rdzv-endpoint rdzv-backend
    node-rank master-addr master-port pty long
    max-restarts no-python nodes ntasks ntasks-per-node gpus-per-task gpus-per-node gpu-bind distribution signal time
    requeue array allow-run-as-root hostfile bind-to kill-on-bad-exit local-rank logdir name noname flags file tag rm
    gpus ipc volume build-arg target editable strict hypothesis-profile no-index find-links
"""
"""Flags of llama-cli, lm_eval, pip, torchrun, mpirun, srun, docker, mkdocs, pytest, and two that stand for any."""
USUAL = {*ALIASES, "recipe", "config", "help"}
# Dotted names of other systems, which are flags, too: --training.steps=100.
FOREIGN = {name for system in SYSTEMS.values() for name in system.rows}
# Flags of this project's scripts, from their parsers.
SCRIPTS = {
    "".join(flag)
    for script in (ROOT / "scripts").rglob("*.py")
    for flag in re.findall(r'"--([a-z][\w-]*)"|\b([a-z]\w*)=Number\(', script.read_text(encoding="utf-8"))
} | {
    flag
    for script in (ROOT / "scripts").rglob("*.sh")
    for flag in re.findall(r"^ +--([a-z][\w-]*)=\*\)", script.read_text(encoding="utf-8"), re.MULTILINE)
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_flags_of_a_page_exist(page: Path) -> None:
    """Paths of files start at the root or at the package."""
    text = text_of(page)
    assert [target for target in LINK.findall(text) if not (page.parent / target).exists()] == []
    homes = (ROOT, ROOT / "pretraining", ROOT / "scripts", ROOT / "docs", ROOT / "tests")
    named = {name for name in FILE.findall(text) if not name.startswith("conf/")}  # a user's own folder
    assert [name for name in sorted(named) if not any((home / name).exists() for home in homes)] == []
    known = {name for command in COMMANDS.values() for name in settings_of(command.settings)}
    known |= USUAL | {name.partition(".")[0] for name in FOREIGN}
    flags = {flag for flag in FLAG.findall(text) if flag.replace("-", "_") not in known}
    assert flags <= SCRIPTS | set(OTHER_PROGRAMS.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_shows_have_these_flags(page: Path) -> None:
    blocks = "\n".join(BLOCK.findall(text_of(page))).replace("\\\n", " ")
    for line in re.findall(r"^ *((?:pretrain \w|bash scripts/train\.sh ).*?)(?:  #.*)?$", blocks, re.MULTILINE):
        words = shlex.split(line.replace("…", ""))
        name = words[1] if words[0] == "pretrain" else "train"
        known = settings_of(COMMANDS[name].settings).keys() | USUAL
        flags = {word[2:].partition("=")[0] for word in words if word.startswith("--")} - FOREIGN
        assert {flag.rpartition(".")[2].replace("-", "_") for flag in flags} <= known, line


def test_the_reference_has_every_public_name_at_its_home() -> None:
    shown = re.findall(r"^::: (\S+)$", text_of(ROOT / "docs" / "reference.md"), re.MULTILINE)
    assert len(shown) == len(set(shown))
    public = {name: getattr(pretraining, name) for name in pretraining.__all__ if name != "__version__"}
    assert {f"{value.__module__}.{name}" for name, value in public.items()} <= set(shown)


def test_replaceable_parts_are_where_the_page_names_them() -> None:
    rows = re.findall(r"\| `(\w+)` in `(pretraining/[\w/]+\.py)`", text_of(ROOT / "docs" / "extending.md"))
    assert len(rows) > 8
    for name, path in rows:
        assert re.search(rf"^(def|class) {name}\b", text_of(ROOT / path), re.MULTILINE), f"{name} in {path}"
