"""Packages travel as wheels: what a machine lacks is installed beside what it has, and nothing of that is replaced."""

from __future__ import annotations

import subprocess
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmark import wheels
from scripts.benchmark.wheels import main, package_of


def make_wheel(folder: Path, name: str) -> Path:
    """A package with one line of code."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "carried = True\n")
        archive.writestr(f"{name}-9.9.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        archive.writestr(
            f"{name}-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-9.9.dist-info/RECORD", "")
    return path


def test_only_what_is_missing_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path / "wheels", "a_package_that_nobody_has")
    make_wheel(tmp_path / "wheels", "pytest")
    main(["install", str(tmp_path / "wheels"), str(tmp_path / "site")])
    assert (tmp_path / "site" / "a_package_that_nobody_has.py").exists()
    assert not (tmp_path / "site" / "pytest.py").exists()
    assert "a-package-that-nobody-has installed, 1 not needed" in capsys.readouterr().out


def test_where_nothing_is_missing_nothing_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path / "wheels", "pytest")
    main(["install", str(tmp_path / "wheels"), str(tmp_path / "site")])
    assert not (tmp_path / "site").exists() and "none installed, 1 not needed" in capsys.readouterr().out


def test_a_folder_without_wheels_and_a_broken_wheel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="error: there is no wheel in"):
        main(["install", str(tmp_path), str(tmp_path / "site")])
    (tmp_path / "broken_package-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(SystemExit, match="error: pip refused a wheel"):
        main(["install", str(tmp_path), str(tmp_path / "site")])


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("charset_normalizer-3.5.2-cp312-cp312-manylinux_2_17_x86_64.whl", "charset-normalizer"),
        ("PyYAML-6.0.3-cp312-cp312-manylinux2014_x86_64.whl", "pyyaml"),
        ("ruamel.yaml-0.18-py3-none-any.whl", "ruamel-yaml"),
    ],
)
def test_a_package_is_known_by_the_name_of_its_wheel(file: str, package: str) -> None:
    assert package_of(Path(file)) == package


def test_wheels_are_collected_for_another_python_and_in_the_versions_of_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        make_wheel(tmp_path / "wheels", "fire")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("scripts.benchmark.wheels.subprocess.run", pip)
    main(["collect", str(tmp_path / "wheels"), "no-such-package", "--races", "--python=3.13", "--architecture=aarch64"])
    [command] = calls
    assert {"--python-version=3.13", "--platform=manylinux_2_28_aarch64", "--no-deps"} <= set(command)
    assert "torchtitan==0.2.2" in command and f"fire=={version('fire')}" in command
    assert "no-such-package" in command and not any(word.partition("==")[0] == "torch" for word in command)
    assert "1 wheels, 0.0 MiB" in capsys.readouterr().out


def test_a_wheel_that_pip_does_not_find_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str]) -> Any:
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("scripts.benchmark.wheels.subprocess.run", pip)
    with pytest.raises(SystemExit, match="error: pip did not find all of them"):
        main(["collect", str(tmp_path / "wheels")])


def test_what_is_collected_names_what_training_takes() -> None:
    """Of setup.py, all but what is large: a machine with PyTorch has that, or takes it from elsewhere."""
    source = (Path(__file__).parents[3] / "setup.py").read_text()
    required = source[source.index("install_requires") : source.index("extras_require")]
    names = {line.strip().strip('",').split(">=")[0].lower() for line in required.splitlines() if ">=" in line}
    assert names - {"torch", "pyarrow", "numpy", "tensorboard"} <= set(wheels.NEEDED)
