"""`training_worker.py` with emulated float8, on devices that have none."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import pytest

from pretraining.distributed import parallelize
from pretraining.distributed.float8 import multiply_in_float8
from pretraining.train import plan

if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "check_float8", lambda scaling, device: None)
    patch.setattr(parallelize, "multiply_in_float8", partial(multiply_in_float8, emulate=True))
    runpy.run_path(str(Path(__file__).with_name("training_worker.py")), run_name="__main__")
