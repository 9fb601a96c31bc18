"""One process of `pretrain doctor` with something wrong: rank 1 multiplies slowly, and the links of rank 2 are slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from pretraining.cli import main
from pretraining.launch.program import run_as_program
from pretraining.tools.doctor import measure


def times(function: Callable[..., float], factor: float) -> Callable[..., float]:
    """The measurement with a factor, so that the test does not depend on what else the machine does."""
    return lambda *arguments, **more: factor * function(*arguments, **more)


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure.MATMUL_SIZES["cpu"] = (128,)
    measure.copy_bytes = lambda device, local_world_size: 2**20
    measure.BUDGET_SECONDS = 0.05
    if os.environ["RANK"] == "1":
        measure.matmul_tflops = times(measure.matmul_tflops, 0.05)
    if os.environ["RANK"] == "2":
        measure.exchange_seconds = times(measure.exchange_seconds, 100.0)
    run_as_program(lambda: main(["doctor", *sys.argv[1:]]))
