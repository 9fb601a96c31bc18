"""setup.sh makes or takes an environment, installs torch first, does it once, and says what stops it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers import run_command
from stand_in import StandIn

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


def python_without(command: str) -> str:
    """A python whose `-m` calls that begin with `command` fail."""
    fails = f'#!/usr/bin/env bash\n[[ $* == "-m {command}"* ]] && exit 1\n'
    return f'{fails}[[ $1 == -m ]] && exit 0\nexec {sys.executable} "$@"\n'


def test_a_faster_encoder_comes_from_a_wheel_alone_and_its_failure_is_no_error(stand_in: StandIn) -> None:
    (requirement,) = re.findall(r'"fast": \["(fastokens.*)"\]', (stand_in.root / "setup.py").read_text())
    change_python(stand_in, "exit 0", "[[ $* != *fastokens* ]]; exit")
    done = set_up(stand_in, stand_in.variables())
    assert any(call.endswith(f"--only-binary=:all: {requirement}") for call in stand_in.all_calls())
    assert "no wheel" in done.stderr and "is ready" in done.stderr


def test_a_torch_that_fits_is_kept(stand_in: StandIn) -> None:
    done = set_up(stand_in, stand_in.variables())
    assert installs(stand_in) == [f"--editable {stand_in.root}"]
    assert "is there, and kept" in done.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.15.1+cu130", "2.14.0a0+fe12.nv26.6"])
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


def test_a_stage_is_one_line(stand_in: StandIn) -> None:
    said = set_up(stand_in, stand_in.variables(), "dev").stderr.splitlines()
    assert [line for line in said if "dev" in line] == ["setup: installing pretraining and what dev needs ..."]
    assert all(line.startswith("setup: ") for line in said)


def test_what_tests_need_is_installed_on_top_of_what_training_needs_and_once(stand_in: StandIn) -> None:
    for extra in ("", "dev", "", "dev"):
        set_up(stand_in, stand_in.variables(), extra)
    assert installs(stand_in) == [f"--editable {stand_in.root}", f"--editable {stand_in.root}[dev]"]


def test_what_tests_need_is_enough_for_training(stand_in: StandIn) -> None:
    for extra in ("dev", ""):
        set_up(stand_in, stand_in.variables(), extra)
    assert installs(stand_in) == [f"--editable {stand_in.root}[dev]"]


def test_another_checkout_in_a_shared_environment_is_noticed(stand_in: StandIn, tmp_path: Path) -> None:
    set_up(stand_in, stand_in.variables())
    installed = tmp_path / "packages" / "pretraining-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pretraining\nVersion: 0.1.0\n")
    origin = {"url": "file:///home/me/other%20one", "dir_info": {"editable": True}}
    (installed / "direct_url.json").write_text(json.dumps(origin))
    done = set_up(stand_in, stand_in.variables(PYTHONPATH=str(tmp_path / "packages")))
    said = f"{stand_in.environment} has the pretraining of /home/me/other one, and now gets that of {stand_in.root}."
    assert said in done.stderr and len(installs(stand_in)) == 2


def test_that_nobody_reads_what_it_says_does_not_end_it(stand_in: StandIn) -> None:
    script = f"exec 2>&-; bash {stand_in.root}/scripts/setup.sh && echo ready"
    assert run_command(["bash", "-c", script], stand_in.variables()).stdout == "ready\n"


def test_without_torch_the_pinned_one_comes_before_everything_else(stand_in: StandIn) -> None:
    change_python(stand_in, f'exec {sys.executable} "$@"', REAL_PYTHON_WITHOUT_PACKAGES)
    set_up(stand_in, stand_in.variables())
    assert installs(stand_in) == ["torch==2.13.0", f"--editable {stand_in.root}"]


def test_a_second_call_installs_nothing(stand_in: StandIn) -> None:
    set_up(stand_in, stand_in.variables())
    before = stand_in.all_calls()
    done = set_up(stand_in, stand_in.variables())
    assert stand_in.all_calls() == before
    assert done.stderr == f"setup: {stand_in.environment} is ready\n"


@pytest.mark.parametrize("file", ["setup.py", "scripts/setup.sh"])
def test_changed_requirements_are_installed(stand_in: StandIn, file: str) -> None:
    set_up(stand_in, stand_in.variables())
    with (stand_in.root / file).open("a") as text:
        text.write("# changed\n")
    set_up(stand_in, stand_in.variables())
    assert len(installs(stand_in)) == 2


def test_a_torch_that_disappeared_is_installed_again(stand_in: StandIn) -> None:
    set_up(stand_in, stand_in.variables())
    change_python(stand_in, f'exec {sys.executable} "$@"', REAL_PYTHON_WITHOUT_PACKAGES)
    set_up(stand_in, stand_in.variables())
    assert "torch==2.13.0" in installs(stand_in)


def test_a_conda_environment_is_used_where_one_is_active(stand_in: StandIn) -> None:
    done = set_up(stand_in, {"VIRTUAL_ENV": "", "CONDA_PREFIX": str(stand_in.environment)})
    assert f"{stand_in.environment} is ready" in done.stderr


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


# What stops it


def assert_stops(stand_in: StandIn, variables: Mapping[str, str], reason: str) -> None:
    done = set_up(stand_in, variables, check=False)
    assert done.returncode == 1
    assert reason in done.stderr
    assert not (stand_in.environment / ".pretraining-setup").exists()


def test_a_python_that_is_too_old_stops_it(stand_in: StandIn) -> None:
    old = stand_in.root / "python3.9"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    variables = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHON": str(old)}
    assert_stops(stand_in, variables, f"PYTHON={old} is no Python 3.11, 3.12 or 3.13")


def test_no_python_at_all_stops_it(stand_in: StandIn) -> None:
    tools = stand_in.root / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(str(shutil.which(name)))
    variables = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHON": "", "PATH": str(tools)}
    assert_stops(stand_in, variables, "no Python 3.11, 3.12 or 3.13 on PATH")


def test_an_active_environment_with_an_old_python_stops_it(stand_in: StandIn) -> None:
    stand_in.add_program("python", "#!/usr/bin/env bash\nexit 1\n")
    assert_stops(stand_in, stand_in.variables(), "has another Python than")


def test_an_active_environment_that_is_gone_stops_it(stand_in: StandIn) -> None:
    assert_stops(stand_in, {"VIRTUAL_ENV": "/nowhere"}, "/nowhere has no bin/python")


def test_a_broken_dot_venv_stops_it(stand_in: StandIn) -> None:
    (stand_in.root / ".venv" / "bin").mkdir(parents=True)
    (stand_in.root / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    assert_stops(stand_in, {"VIRTUAL_ENV": "", "CONDA_PREFIX": ""}, "Remove the folder and run this again")


def test_a_python_without_venv_stops_it_and_leaves_nothing_half_made(stand_in: StandIn) -> None:
    stand_in.add_program("python", python_without("venv"))
    python = str(stand_in.environment / "bin" / "python")
    variables = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHON": python}
    assert_stops(stand_in, variables, "python3-venv")
    assert not (stand_in.root / ".venv").exists()


def test_an_environment_that_can_have_no_pip_stops_it(stand_in: StandIn) -> None:
    text = f'#!/usr/bin/env bash\n[[ $1 == -m ]] && exit 1\nexec {sys.executable} "$@"\n'
    stand_in.add_program("python", text)
    assert_stops(stand_in, stand_in.variables(), "has no pip and cannot make one")


def test_an_install_that_fails_stops_it(stand_in: StandIn) -> None:
    stand_in.add_program("python", python_without("pip install"))
    assert_stops(stand_in, stand_in.variables(), "could not install pretraining's requirements")
