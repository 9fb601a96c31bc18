"""One process of a short `pretrain doctor`."""

from __future__ import annotations

import sys

import torch

from pretraining.cli import main
from pretraining.launch.program import run_as_program
from pretraining.tools import doctor

if __name__ == "__main__":
    torch.set_num_threads(1)
    doctor.MATMUL_SIZE["cpu"], doctor.MESSAGE_BYTES["cpu"] = 128, 2**20
    doctor.FILE_MIB = 1
    run_as_program(lambda: main(["doctor", *sys.argv[1:]]))
