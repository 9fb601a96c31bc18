"""One process of `pretrain doctor` with something wrong: rank 1 multiplies slowly, and the links of rank 2 are slow."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from pretraining.cli import main
from pretraining.launch.program import run_as_program
from pretraining.tools.doctor import measure


def finding(function: Callable[..., object], found: float) -> Callable[..., float]:
    """The measurement with its result replaced, so that the test does not depend on what else the machine does."""

    def measured(*arguments: object, **named: object) -> float:
        function(*arguments, **named)
        return found

    return measured


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure.MATMUL_SIZES["cpu"] = (128,)
    measure.copy_bytes = lambda device, local_world_size: 2**20
    measure.BUDGET_SECONDS = 0.05
    copies = measure._measure_copies
    measure._measure_copies = lambda device, size: [replace(rate, value=1.0) for rate in copies(device, size)]
    measure.matmul_tflops = finding(measure.matmul_tflops, 0.05 if os.environ["RANK"] == "1" else 1.0)
    measure.exchange_seconds = finding(measure.exchange_seconds, 0.1 if os.environ["RANK"] == "2" else 0.001)
    run_as_program(lambda: main(["doctor", *sys.argv[1:]]))
