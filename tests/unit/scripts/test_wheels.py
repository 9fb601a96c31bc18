"""Packages travel as wheels: what a machine lacks is installed beside what it has, and nothing of that is replaced."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from scripts.benchmark.wheels import main


def make_wheel(folder: Path, name: str) -> Path:
    """A package with one line of code."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-9.9-py3-none-any.whl"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "carried = True\n")
        for file, text in files.items():
            archive.writestr(f"{name}-9.9.dist-info/{file}", text)
    return path


@pytest.mark.thorough
def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "a_package_that_nobody_has")
    make_wheel(tmp_path / "wheels", "pytest")
    main(["install", str(tmp_path / "wheels"), str(tmp_path / "site")])
    assert (tmp_path / "site" / "a_package_that_nobody_has.py").exists()
    assert not (tmp_path / "site" / "pytest.py").exists()
