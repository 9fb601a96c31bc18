"""setup.sh makes or takes an environment, installs torch first, does it once, and says what stops it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import run_command
from stand_in import StandIn
from tiers import first_quick

REAL_PYTHON_WITHOUT_PACKAGES = f'exec {sys.executable} -S "$@"'


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def set_up(
    stand_in: StandIn, variables: Mapping[str, str], *extra: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    return run_command(["bash", stand_in.root / "scripts" / "setup.sh", *extra], variables, check=check)


def installs(stand_in: StandIn) -> list[str]:
    words = "pip install --quiet --disable-pip-version-check "
    found = [call.partition(words)[2] for call in stand_in.all_calls() if "pip install" in call]
    return [call for call in found if "fastokens>=" not in call]  # whose failure is no error


def change_python(stand_in: StandIn, old: str, new: str) -> None:
    python = stand_in.environment / "bin" / "python"
    text = python.read_text()
    assert old in text
    python.write_text(text.replace(old, new))


def test_a_faster_encoder_comes_from_a_wheel_alone_and_its_failure_is_no_error(stand_in: StandIn) -> None:
    (requirement,) = re.findall(r'"fast": \["(fastokens.*)"\]', (stand_in.root / "setup.py").read_text())
    change_python(stand_in, "exit 0", "[[ $* != *fastokens* ]]; exit")
    done = set_up(stand_in, stand_in.variables())
    assert any(call.endswith(f"--only-binary=:all: {requirement}") for call in stand_in.all_calls())
    assert "no wheel" in done.stderr and "is ready" in done.stderr


@pytest.mark.parametrize("version", first_quick("2.15.1+cu130", "2.11.0", "2.14.0a0+fe12.nv26.6"))
def test_a_torch_of_an_active_environment_stays_whatever_other_packages_ask_for(
    stand_in: StandIn, tmp_path: Path, version: str
) -> None:
    text = (stand_in.environment / "bin" / "python").read_text()
    noting = f'[[ $2 == pip ]] && cat $PIP_CONSTRAINT >>"{tmp_path}/constraints" 2>/dev/null'
    stand_in.add_program("python", text.replace("\n", f"\n{noting}\n", 1))
    done = set_up(stand_in, with_torch(stand_in, tmp_path / "packages", version))
    assert installs(stand_in) == [f"--editable {stand_in.root}"]
    assert f"torch {version} is there, and kept" in done.stderr
    assert set((tmp_path / "constraints").read_text().splitlines()) == {f"torch=={version}"}


@pytest.mark.parametrize(("version", "fit"), [("2.10.2", "older"), ("2.16.0.dev20261101+cu130", "newer")])
def test_another_torch_of_an_active_environment_ends_with_what_to_do_and_nothing_is_changed(
    stand_in: StandIn, tmp_path: Path, version: str, fit: str
) -> None:
    reason = f"has torch {version}, {fit} than 2.11 to 2.15, which this project runs on. Nothing was changed."
    assert_stops(stand_in, with_torch(stand_in, tmp_path / "packages", version), reason)
    assert installs(stand_in) == []


def with_torch(stand_in: StandIn, packages: Path, version: str) -> dict[str, str]:
    """The stand-in's variables, with a torch that is found before any other."""
    metadata = packages / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return stand_in.variables(PYTHONPATH=str(packages))


@pytest.mark.thorough
def test_without_an_active_environment_dot_venv_is_made(stand_in: StandIn) -> None:
    """A real venv; its pip is taken away so that nothing is installed into it."""
    wrapper = stand_in.root / "python-here"
    wrapper.write_text(f'#!/usr/bin/env bash\n[[ $* == "-m venv"* ]] && exec {sys.executable} "$@" --without-pip\n')
    with wrapper.open("a") as text:
        text.write(f'exec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    variables = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHON": str(wrapper), "PIP_NO_INDEX": "1"}
    done = set_up(stand_in, {**variables, "PIP_FIND_LINKS": "/nowhere"}, check=False)
    assert f"making {stand_in.root}/.venv" in done.stderr
    assert (stand_in.root / ".venv" / "bin" / "python").exists()
    assert done.returncode == 1
    assert "could not install torch 2.13.0" in done.stderr and "PIP_INDEX_URL" in done.stderr


def assert_stops(stand_in: StandIn, variables: Mapping[str, str], reason: str) -> None:
    done = set_up(stand_in, variables, check=False)
    assert done.returncode == 1
    assert reason in done.stderr
    assert not (stand_in.environment / ".pretraining-setup").exists()


def test_torch_comes_before_all_else_and_a_later_call_installs_only_what_has_changed(stand_in: StandIn) -> None:
    set_up(stand_in, {"VIRTUAL_ENV": "", "CONDA_PREFIX": str(stand_in.environment)})
    before = stand_in.all_calls()
    set_up(stand_in, stand_in.variables())
    assert stand_in.all_calls() == before
    with (stand_in.root / "setup.py").open("a") as text:
        text.write("# another requirement\n")
    set_up(stand_in, stand_in.variables())
    assert stand_in.all_calls() != before and "torch==2.13.0" not in installs(stand_in)
    change_python(stand_in, f'exec {sys.executable} "$@"', REAL_PYTHON_WITHOUT_PACKAGES)
    set_up(stand_in, stand_in.variables())
    assert installs(stand_in)[-2:] == ["torch==2.13.0", f"--editable {stand_in.root}"]


@pytest.mark.parametrize(
    ("python", "variables", "reason"),
    [
        ("exit 1", {}, "has another Python than"),
        ("exit 1", {"VIRTUAL_ENV": "", "PYTHON": "{environment}/bin/python"}, "is no Python 3.11, 3.12 or 3.13"),
        ("exit 1", {"VIRTUAL_ENV": "", "PYTHON": "", "PATH": "{environment}/bin"}, "on PATH"),
        ("", {"VIRTUAL_ENV": "/nowhere"}, "/nowhere has no bin/python"),
        (
            f'[[ $* == "-m venv"* ]] && exit 1\nexec {sys.executable} "$@"',
            {"VIRTUAL_ENV": "", "PYTHON": "{environment}/bin/python"},
            "python3-venv",
        ),
        (f'[[ $1 == -m ]] && exit 1\nexec {sys.executable} "$@"', {}, "has no pip and cannot make one"),
        (
            f'[[ $* == "-m pip install"* ]] && exit 1\n[[ $1 == -m ]] && exit 0\nexec {sys.executable} "$@"',
            {},
            "could not install",
        ),
    ],
)
def test_what_stops_it_is_named_and_leaves_nothing_half_made(
    python: str, variables: dict[str, str], reason: str, stand_in: StandIn
) -> None:
    if python:
        stand_in.add_program("python", f"#!{shutil.which('bash')}\n{python}\n")
    for name in ("bash", "dirname"):
        (stand_in.environment / "bin" / name).symlink_to(str(shutil.which(name)))
    given = {name: value.format(environment=stand_in.environment) for name, value in variables.items()}
    assert_stops(stand_in, {**stand_in.variables(CONDA_PREFIX=""), **given}, reason)
    assert not (stand_in.root / ".venv").exists()
