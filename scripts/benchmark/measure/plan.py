"""How far the estimate of memory is from simulated steps, over a grid of settings; and what simulations cost.

    python -m scripts.benchmark.measure.plan
    python -m scripts.benchmark.measure.plan --large=1      # 7b on 128 GPUs and 70b on 1,024: a process each

Both are arithmetic of a GPU's memory, made on any machine: `pretrain plan --simulate=true` for each row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from pretraining.config.command_line import parse_config
from pretraining.config.commands import PlanConfig
from pretraining.tools.plan import compare, difference, simulate_plan
from scripts.benchmark.common import Number, Table, announce, flag_parser, in_turn

AC = "fsdp_activation_checkpointing=true"
GRID = (
    "125m gpus=1 sharding_strategy=ddp batch_size=16 seq_length=1024",
    "125m gpus=8 sharding_strategy=ddp batch_size=32 seq_length=1024 grad_accum_steps=2",
    f"125m gpus=1 sharding_strategy=ddp batch_size=16 seq_length=1024 {AC}",
    "llama3.2_1b gpus=1 sharding_strategy=ddp batch_size=2 seq_length=2048",
    "llama3.2_1b gpus=8 batch_size=8 seq_length=2048 optimizer=muon",
    "7b gpus=128 batch_size=1 seq_length=4096",
    "7b gpus=128 batch_size=4 seq_length=4096",
    "7b gpus=128 batch_size=2 seq_length=1024 grad_accum_steps=4",
    f"7b gpus=128 batch_size=2 seq_length=4096 {AC}",
    f"7b gpus=128 batch_size=2 seq_length=4096 {AC} selective_checkpointing=1/2",
    f"7b gpus=128 batch_size=2 seq_length=4096 {AC} selective_checkpointing=1/3",
    f"7b gpus=128 batch_size=2 seq_length=4096 {AC} selective_checkpointing=op",
    "7b gpus=8 sharding_strategy=zero2 batch_size=1 seq_length=4096",
    "7b gpus=32 sharding_strategy=hsdp batch_size=1 seq_length=4096",
    "7b gpus=32 sharding_strategy=hsdp batch_size=1 seq_length=4096 grad_accum_steps=4",
    f"7b gpus=32 sharding_strategy=hsdp_zero2 batch_size=2 seq_length=2048 {AC}",
    "llama3_8b gpus=64 batch_size=1 seq_length=8192",
    "llama3_8b gpus=64 batch_size=2 seq_length=2048 loss_chunk_tokens=0",
    f"llama3_8b gpus=64 batch_size=2 seq_length=8192 {AC}",
    "13b gpus=64 batch_size=1 seq_length=4096 vocab_size=128256",
    f"70b gpus=256 batch_size=1 seq_length=4096 {AC} selective_checkpointing=1/2",
    f"70b gpus=1024 batch_size=1 seq_length=8192 {AC}",
    "70b gpus=1024 batch_size=1 seq_length=8192",
)
"""Flags of `pretrain plan`, a model first."""
LARGE = (
    f"7b gpus=128 batch_size=1 seq_length=4096 {AC}",
    f"70b gpus=1024 batch_size=1 seq_length=8192 {AC}",
    f"70b gpus=1024 sharding_strategy=hsdp hsdp_group_size=8 batch_size=1 seq_length=8192 {AC}",
    "70b gpus=1024 batch_size=1 seq_length=8192",
)
"""What is simulated in a process of its own, to see what that takes."""
GIB = 2**30


def simulated(flags: str) -> Iterator[str]:
    """Yields the cells of a row: activations and loss, then everything at the peak."""
    variant, *rest = flags.split()
    config = parse_config(PlanConfig, [f"model_variant={variant}", *rest], {})
    chosen, found = simulate_plan(config)
    parts = {name: sizes for name, *sizes in compare(chosen.memory, found)}
    for name in ("activations, loss", "at the peak"):
        estimate, simulation = parts[name]
        yield from (f"{estimate / GIB:.2f}", f"{simulation / GIB:.2f}", difference(estimate, simulation))


def cost(flags: str) -> tuple[str, str, str]:
    """Returns seconds, seconds of a core and GiB that a process takes for a simulation, from its start to its end."""
    variant, *rest = flags.split()
    command = [sys.executable, "-m", "pretraining", "plan", f"--model_variant={variant}", "--simulate=true"]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *(f"--{flag}" for flag in rest)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: the simulation of {flags} failed")
    seconds = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    return f"{seconds[0]:.0f}", f"{seconds[1]:.0f}", f"{usage.ru_maxrss / 2**20:.2f}"


def main() -> None:
    flags = flag_parser(
        (__doc__ or "").splitlines()[0], large=Number(0, "1 = time and memory of large simulations", 0)
    ).parse_args()
    announce(flags)
    if flags.large:
        table = Table("settings", "seconds", "of a core", "GiB of the process")
        for each in in_turn(LARGE):
            table.add(f"`{each}`", *cost(each))
    else:
        columns = ("estimated", "simulated", "difference")
        table = Table("settings", *columns, *(f"peak, {name}" for name in columns))
        for each in in_turn(GRID):
            table.add(f"`{each}`", *simulated(each))
    table.print()


if __name__ == "__main__":
    main()
