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


@pytest.mark.parametrize(
    ("version", "fits"),
    first_quick(
        *(("2.15.1+cu130", True), ("2.10.2", False), ("2.16.0.dev20261101+cu130", False)),
        *(("2.11.0", True), ("2.14.0a0+fe12.nv26.6", True)),
        quick=3,
    ),
)
def test_an_installed_torch_is_kept_or_refused(stand_in: StandIn, tmp_path: Path, version: str, fits: bool) -> None:
    metadata = tmp_path / "packages" / f"torch-{version}.dist-info" / "METADATA"  # found before any other torch
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    done = set_up(stand_in, stand_in.variables(PYTHONPATH=str(tmp_path / "packages")), check=fits)
    assert (done.returncode == 0) is fits and (version in done.stderr or fits)
    assert installs(stand_in) == [f"--editable {stand_in.root} torch=={version}"] * fits
    assert (stand_in.environment / ".pretraining-setup").exists() is fits


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
