"""One process of `pretrain doctor` with something wrong: rank 1 multiplies slowly, and rank 2 is slow to be reached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from pretraining.cli import main
from pretraining.launch.program import run_as_program
from pretraining.tools import doctor


def finding(function: Callable[..., object], found: float) -> Callable[..., float]:
    """The measurement with its result replaced, so that the test does not depend on what else the machine does."""

    def measured(*arguments: object, **named: object) -> float:
        function(*arguments, **named)
        return found

    return measured


if __name__ == "__main__":
    torch.set_num_threads(1)
    doctor.MATMUL_SIZE["cpu"], doctor.COPY_BYTES["cpu"] = 128, 2**20
    doctor.BUDGET_SECONDS = 0.05
    doctor.matmul_tflops = finding(doctor.matmul_tflops, 0.05 if os.environ["RANK"] == "1" else 1.0)
    doctor.exchange_seconds = finding(doctor.exchange_seconds, 0.1 if os.environ["RANK"] == "2" else 0.001)
    run_as_program(lambda: main(["doctor", *sys.argv[1:]]))
