"""One of two processes: rank 1 fails alone, with a collective under way that rank 0 never joins."""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist

from pretraining import cli
from pretraining.errors import DataError
from pretraining.launch.program import run_as_program
from pretraining.train import run


def fail_alone(*arguments: Any) -> Any:
    if dist.get_rank() == 1:
        atexit.register(threading.Event().wait)  # as what waits for the others at the end of a program
        dist.all_reduce(torch.ones(1), async_op=True)
        error = DataError("a file of this machine is gone")
        error.rank = 1
        raise error
    dist.recv(torch.ones(1), src=1)


if __name__ == "__main__":
    run.train_with_rollbacks = fail_alone  # type: ignore[assignment]
    run_as_program(lambda: cli.main(["train", *sys.argv[1:]]))
