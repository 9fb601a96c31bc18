"""One process of `pretrain doctor` with something wrong: rank 1 multiplies slowly, and rank 2 answers late."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from pretraining.cli import main
from pretraining.doctor import devices, links


def ten_times_slower(measure: Callable[..., float]) -> Callable[..., float]:
    return lambda *arguments: measure(*arguments) / 10


def late(exchange: Callable[..., None]) -> Callable[..., None]:
    def sleep_and_exchange(*arguments: Any) -> None:
        time.sleep(0.1)
        exchange(*arguments)

    return sleep_and_exchange


if __name__ == "__main__":
    torch.set_num_threads(1)
    devices.MATMUL_SIZES["cpu"] = (128,)  # type: ignore[assignment]
    if os.environ["RANK"] == "1":
        devices.matmul_tflops = ten_times_slower(devices.matmul_tflops)
    if os.environ["RANK"] == "2":
        links._exchange = late(links._exchange)
    main(["doctor", *sys.argv[1:]])
