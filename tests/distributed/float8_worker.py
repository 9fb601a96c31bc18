"""`training_worker.py` with emulated float8, on devices that have none."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from emulated_float8 import emulate_float8

if __name__ == "__main__":
    emulate_float8(pytest.MonkeyPatch())
    runpy.run_path(str(Path(__file__).with_name("training_worker.py")), run_name="__main__")
