"""Starts a benchmark in the test's process, as far as its flags."""

from __future__ import annotations

import runpy
import sys
import warnings
from importlib import metadata

import pytest
import torch

from scripts.benchmark import common


def start(benchmark: str, *flags: str) -> int | str | None:
    """Starts a benchmark as if it was typed; what it ends with, before it has measured anything."""
    if benchmark == "compare.against_trainer":
        pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [benchmark, *flags])
        patch.setattr(common, "machine", lambda: pytest.fail("it went on to measure"))
        warnings.filterwarnings("ignore", message=".*found in sys.modules")  # others import from it
        runpy.run_module(f"scripts.benchmark.{benchmark}", run_name="__main__")
    return end.value.code


def pretend_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Lets a benchmark think that there is a GPU, and the torchtitan that it asks for."""
    real = metadata.version
    patch.setattr(metadata, "version", lambda package: "0.2.2" if package == "torchtitan" else real(package))
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
