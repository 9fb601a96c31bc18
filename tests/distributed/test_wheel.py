"""The wheel alone, outside of the checkout: it prepares the demo's text and trains on it. And an editable install."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import ROOT, run_command

pytestmark = pytest.mark.thorough

NOT_THE_CHECKOUT = {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Programs of an environment that holds nothing but the wheel, beside the libraries that this one has."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "pretraining", source / "pretraining", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run_command([*pip, "wheel", source, "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path])
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "environment"
    run_command([sys.executable, "-m", "venv", "--without-pip", environment])
    pip_there: list[str | Path] = [*pip, "--python", environment / "bin" / "python"]
    run_command([*pip_there, "install", "--no-deps", "--no-index", wheel], NOT_THE_CHECKOUT)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # Only the folder: .pth files in it, such as that of an editable checkout, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(source)
    return environment / "bin"


def test_an_editable_install_of_a_clone_called_pretraining_wins_over_the_clones_folder(tmp_path: Path) -> None:
    clone, above = tmp_path / "pretraining", tmp_path / "environment"
    shutil.copytree(ROOT / "pretraining", clone / "pretraining", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, clone / name)
    run_command([sys.executable, "-m", "venv", "--without-pip", above])
    python = above / "bin" / "python"
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(above)})) / "libraries.pth"
    libraries.write_text(sysconfig.get_path("purelib") + "\n")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run_command([*pip, "install", "--no-deps", "--no-build-isolation", "--editable", clone], NOT_THE_CHECKOUT)
    (tmp_path / "script.py").write_text("from pretraining import Trainer\nprint(Trainer.__name__)\n")
    words: list[str]
    for words in (["script.py"], ["-c", "from pretraining import Trainer; print(Trainer.__name__)"]):
        assert run_command([python, *words], NOT_THE_CHECKOUT, cwd=tmp_path).stdout == "Trainer\n"
    assert (
        "pretrain train" in run_command([python, "-m", "pretraining", "--help"], NOT_THE_CHECKOUT, cwd=tmp_path).stdout
    )


def test_the_wheel_prepares_and_trains_the_demo(installed: Path, tmp_path: Path) -> None:
    pretrain = installed / "pretrain"
    where = "import pretraining, sys; sys.stdout.write(pretraining.__file__)"
    home = run_command([installed / "python", "-c", where], NOT_THE_CHECKOUT, cwd=tmp_path).stdout
    assert home.startswith(str(installed.parent)), home
    text = ["--source=stdlib", "--vocab_size=4096", "--output_path=data/demo"]
    run_command([pretrain, "prepare", *text], NOT_THE_CHECKOUT, cwd=tmp_path)
    train: list[str | Path] = [pretrain, "train", "--recipe=demo", "--num_steps=3", "--eval_batches=1"]
    out = run_command(train, NOT_THE_CHECKOUT, cwd=tmp_path).stdout
    assert "Finished 3 steps" in out and (tmp_path / "runs/demo/checkpoints/step_3_ckp/manifest.json").is_file()
