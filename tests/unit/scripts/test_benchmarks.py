"""The commands of a measurement on a GPU, which no machine here can run, accept their flags."""

from __future__ import annotations

import runpy
import shlex
import sys
import warnings

import pytest
import torch

from pretraining.config.command_line import load_train_config
from scripts.benchmark import common
from scripts.benchmark.gpu_parts import PARTS

TASKS = [task for tasks in PARTS.values() for task in tasks]
ON_GPU = [shlex.split(task.arguments) for task in TASKS if not task.arguments.startswith("pytest")]


@pytest.mark.thorough
@pytest.mark.parametrize("command", ON_GPU, ids=" ".join)
def test_every_command_of_a_gpu_part_accepts_its_flags(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, *flags = command
    if command[:2] == ["pretraining", "train"]:
        load_train_config(command[2:])
        return
    if benchmark.endswith(("against_trainer", "peak_memory")):
        pytest.importorskip("accelerate")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", [benchmark, *flags, "--check_flags"])
    monkeypatch.setattr(common, "machine", lambda: pytest.fail("it began to measure"))
    with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        warnings.filterwarnings("ignore", message=".*found in sys.modules")  # others import from it
        runpy.run_module(benchmark, run_name="__main__")
    assert end.value.code is None
