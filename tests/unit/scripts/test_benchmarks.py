"""Benchmarks refuse what they cannot measure before they begin, compare equal work, and run in parts on a GPU."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers import ROOT, plain_environment

from pretraining.config.command_line import load_train_config
from scripts.benchmark import common
from scripts.benchmark.gpu_parts import PART_SECONDS, PARTS, Task, run_part

BENCHMARKS = sorted(
    f"{path.parent.name}.{path.stem}"
    for folder in ("measure", "compare")
    for path in (ROOT / "scripts/benchmark" / folder).glob("*.py")
    if "__main__" in path.read_text()
)
TASKS = [task for tasks in PARTS.values() for task in tasks]
ON_GPU = [shlex.split(task.arguments) for task in TASKS if not task.arguments.startswith("pytest")]
SMALL = (
    *("--model_variant=tiny", "--hidden_size=32", "--num_attention_heads=4", "--intermediate_size=64"),
    *("--num_hidden_layers=1", "--vocab_size=64", "--seq_length=32", "--mixed_precision=false"),
    *("--rounds=1", "--steps=2", "--report_interval=2", "--global_batch_size=8", "--learning_rate=0.001"),
)


def start(benchmark: str, *flags: str) -> int | str | None:
    """Starts a benchmark as if it was typed; what it ends with, before it has measured anything."""
    if benchmark in ("compare.against_trainer", "compare.peak_memory"):
        pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [benchmark, *flags])
        patch.setattr(common, "machine", lambda: pytest.fail("it went on to measure"))
        warnings.filterwarnings("ignore", message=".*found in sys.modules")  # others import from it
        runpy.run_module(f"scripts.benchmark.{benchmark}", run_name="__main__")
    return end.value.code


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a benchmark think that there is a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_flags_can_be_checked_without_measuring(benchmark: str) -> None:
    assert start(benchmark, "--check_flags") is None


@pytest.mark.thorough
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("command", ON_GPU, ids=" ".join)
def test_every_command_of_a_gpu_part_accepts_its_flags(command: list[str]) -> None:
    if command[:2] == ["pretraining", "train"]:
        load_train_config([flag.lstrip("-") for flag in command[2:]])
    else:
        assert start(command[0].removeprefix("scripts.benchmark."), *command[1:], "--check_flags") is None


@pytest.mark.parametrize(
    ("benchmark", "flags", "named"),
    [
        ("measure.loader", ["--tokens=5"], "--tokens: must be 10,000,000"),
        ("measure.training_loop", ["--report_interval=161"], "--report_interval=161"),
        ("compare.against_ddp", ["--run.num_steps=3"], "--num_steps"),
    ],
)
def test_a_benchmark_refuses_unsuitable_flags_before_measuring(
    benchmark: str, flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = start(benchmark, *flags)
    assert code not in (0, None) and named in f"{code} {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "processes", "a_step"),
    [
        ("compare.against_ddp", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 2, "2 micro-batches of 2 x 32 tokens on each of 2 processes"),
        ("compare.against_trainer", 1, "4 micro-batches of 2 x 32 tokens"),
    ],
)
def test_both_contenders_end_at_the_same_loss(benchmark: str, processes: int, a_step: str) -> None:
    if benchmark == "compare.against_trainer":
        pytest.importorskip("accelerate")
    command = [sys.executable, "-m", f"scripts.benchmark.{benchmark}", *SMALL, f"--processes={processes}"]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"a step is {a_step}\n" in done.stdout
    first, second = (line.split("|")[4] for line in done.stdout.splitlines() if re.match(r"\| \w", line))
    assert first == second
    assert re.search(r"^.+ / .+: \d\.\d{3} \(-\), median of 1 rounds", done.stdout, re.MULTILINE)


def test_parts_take_at_most_nine_minutes_and_one_of_them_runs_each_test_of_a_gpu() -> None:
    assert all(0 < sum(task.seconds for task in tasks) <= PART_SECONDS == 9 * 60 for tasks in PARTS.values())
    named = {word for task in TASKS for word in task.arguments.split() if word.endswith(".py")}
    assert named == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_paths_are_relative_to_the_folder_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$PWD $PYTHONPATH $*"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(ROOT / "scripts/benchmark/on_gpu.sh"), "tests", "--output=results"]
    environment = plain_environment({"PYTHON": "./python", "PYTHONPATH": "mine"})
    printed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert printed == f"{tmp_path} {ROOT}:mine -m scripts.benchmark.gpu_parts tests --output=results\n"


def test_a_failed_command_is_named_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    for name, code in (
        ("measures", "print('measured')"),
        ("fails", "import no_such_package"),
        ("hangs", "while True: pass"),
        ("dies", "import os; os.kill(os.getpid(), 9)"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
    tasks = [Task(100, "fails"), Task(1, "hangs"), Task(100, "dies"), Task(100, "measures")]
    log = tmp_path / "out" / "races.log"
    assert run_part(tasks, log, "pass") == 3 and run_part(tasks, tmp_path / "none.log", "raise SystemExit(1)") == 1
    lines = log.read_text().splitlines()
    assert "ModuleNotFoundError: No module named 'no_such_package'" in lines and "measured" in lines
    assert [line for line in lines if line.startswith(("failed", "succeeded"))] == [
        "failed: exit code 1",
        "failed: it exceeded its time limit",
        "failed: it was killed, perhaps out of memory",
        "succeeded",
    ]
