"""setup.sh makes or takes an environment, installs torch first, keeps one that is there, does it once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import run_command
from stand_in import StandIn
from tiers import first_quick


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


def set_up(stand_in: StandIn, variables: Mapping[str, str], check: bool = True) -> subprocess.CompletedProcess[str]:
    return run_command(["bash", stand_in.root / "scripts" / "setup.sh"], variables, check=check)


def installs(stand_in: StandIn) -> list[str]:
    words = "pip install --quiet --disable-pip-version-check --no-compile "
    found = [call.partition(words)[2] for call in stand_in.all_calls() if "pip install" in call]
    return [call for call in found if "fastokens>=" not in call]  # whose failure is no error


@pytest.mark.parametrize("version", first_quick("2.15.1+cu130", "2.11.0", "2.14.0a0+fe12.nv26.6"))
def test_an_installed_torch_is_kept(stand_in: StandIn, tmp_path: Path, version: str) -> None:
    set_up(stand_in, with_torch(stand_in, tmp_path / "packages", version))
    assert installs(stand_in) == [f"--editable {stand_in.root} torch=={version}"]


@pytest.mark.parametrize("version", ["2.10.2", "2.16.0.dev20261101+cu130"])
def test_another_torch_is_refused_and_nothing_is_changed(stand_in: StandIn, tmp_path: Path, version: str) -> None:
    done = set_up(stand_in, with_torch(stand_in, tmp_path / "packages", version), check=False)
    assert done.returncode == 1 and version in done.stderr and installs(stand_in) == []
    assert not (stand_in.environment / ".pretraining-setup").exists()


def with_torch(stand_in: StandIn, packages: Path, version: str) -> dict[str, str]:
    """The stand-in's variables, with a torch that is found before any other."""
    metadata = packages / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return stand_in.variables(PYTHONPATH=str(packages))


def test_torch_is_installed_first_and_a_later_call_installs_only_changes(stand_in: StandIn) -> None:
    set_up(stand_in, {"VIRTUAL_ENV": "", "CONDA_PREFIX": str(stand_in.environment)})
    before = stand_in.all_calls()
    set_up(stand_in, stand_in.variables())
    assert stand_in.all_calls() == before
    with (stand_in.root / "setup.py").open("a") as text:
        text.write("# another requirement\n")
    set_up(stand_in, stand_in.variables())
    assert stand_in.all_calls() != before and "torch==2.13.0" not in installs(stand_in)
    python = stand_in.environment / "bin" / "python"
    python.write_text(python.read_text().replace(f'exec {sys.executable} "$@"', f'exec {sys.executable} -S "$@"'))
    set_up(stand_in, stand_in.variables())  # an environment without torch
    assert installs(stand_in)[-2:] == ["torch==2.13.0", f"--editable {stand_in.root} torch==2.13.0"]
