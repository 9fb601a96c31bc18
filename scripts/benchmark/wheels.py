"""Carries Python packages to a machine without a network: wheels are collected here and installed there.

    python scripts/benchmark/wheels.py collect wheels --python=3.12          # in this project's environment
    python scripts/benchmark/wheels.py collect wheels --races pandas         # with rivals' packages, and one more
    python scripts/benchmark/wheels.py install wheels site                   # there; then PYTHONPATH=site

What is collected is small: what a machine that has PyTorch, pyarrow and TensorBoard may lack; never torch itself.
There, a wheel is installed only where its package is missing altogether, into a folder of its own: nothing that is
there is replaced. Needs nothing but Python and pip.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NEEDED = (
    *("torchdata", "requests", "urllib3", "idna", "certifi", "charset-normalizer", "fire", "termcolor"),
    *("annotated-types", "tokenizers", "fastokens", "safetensors", "pyyaml", "rich", "markdown-it-py", "mdurl"),
    *("pygments", "torchao", "pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy"),
)
"""What training takes, float8, and tests."""
OF_RACES = (
    *("transformers", "accelerate", "torchtitan==0.2.2", "tyro", "typeguard", "docstring-parser", "einops"),
    *("datasets", "dill", "multiprocess", "xxhash"),
)
"""What the comparisons with transformers and torchtitan take beside that."""
GLIBC_MINOR = range(17, 40)
"""Of the versions 2.x that a wheel may be built for; pip takes them literally."""


def collect(folder: Path, packages: Sequence[str], python: str, architecture: str) -> None:
    """Download a wheel of each package, in the version of this environment where it is there.

    Raises:
        SystemExit: pip has no such wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"manylinux_2_{minor}_{architecture}" for minor in reversed(GLIBC_MINOR)]
    platforms += [f"manylinux{year}_{architecture}" for year in ("2014", "2010", "1")]
    options = ["--no-deps", "--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    options += [f"--platform={platform}" for platform in platforms]
    wanted = [package if "==" in package else _as_here(package) for package in packages]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, f"--dest={folder}", *wanted]
    if subprocess.run(command).returncode:
        sys.exit("error: pip did not find all of them: its message stands above")
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB")


def install(folder: Path, site: Path) -> None:
    """Installs the wheels whose packages are missing.

    Raises:
        SystemExit: there are no wheels, or pip refuses one.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        sys.exit(f"error: there is no wheel in {folder}: python scripts/benchmark/wheels.py collect {folder}")
    missing = [wheel for wheel in wheels if not _is_installed(package_of(wheel))]
    if missing:
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", f"--target={site}"]
        if subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, missing)]).returncode:
            sys.exit("error: pip refused a wheel: its message stands above")
    print(
        f"wheels    {' '.join(map(package_of, missing)) or 'none'} installed, {len(wheels) - len(missing)} not needed"
    )


def package_of(wheel: Path) -> str:
    """Return the package's name, in the form that is used for comparisons."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _as_here(package: str) -> str:
    return f"{package}=={version(package)}" if _is_installed(package) else package


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Wheels for a machine without a network.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="download them")
    collecting.add_argument("folder", type=Path)
    collecting.add_argument("packages", nargs="*", help="more than those that training and tests take")
    collecting.add_argument("--races", action="store_true", help="and what comparisons with other programs take")
    collecting.add_argument("--python", default="3.12", help="version there (default %(default)s)")
    collecting.add_argument("--architecture", default="x86_64", help="of the processor there (default %(default)s)")
    installing = commands.add_parser("install", help="install those that are missing")
    installing.add_argument("folder", type=Path)
    installing.add_argument("site", type=Path, help="folder for the packages")
    flags = parser.parse_args(arguments)
    if flags.command == "install":
        install(flags.folder, flags.site)
    else:
        packages = (*NEEDED, *(OF_RACES if flags.races else ()), *flags.packages)
        collect(flags.folder, packages, flags.python, flags.architecture)


if __name__ == "__main__":
    main()
