"""What activation checkpointing and compilation cost in time, and what they save in memory, on one device.

    python -m scripts.benchmark.measure.levers --rounds=4 --steps=2
    python -m scripts.benchmark.measure.levers --model_variant=125m --seq_length=1024 --batch_size=16

All of them train the same model in turns, a few steps each; times are relative to those of training without any, turn
by turn. Memory is the peak of the device; on a CPU that of the process, with all that PyTorch itself takes.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.estimate.flops import recomputed_share
from scripts.benchmark.common import LENGTH, Number, Table, announce, parse, read_settings, spread
from scripts.benchmark.common import train_project as train
from scripts.benchmark.race import ON_CPU, ON_GPU, RACE, Lane, Turn, run_race

CHECKPOINTING = {"none": None, "per operation": "op", "a third": "1/3", "a half": "2", "all": "1"}
OWN = (
    *LENGTH,
    "report_interval",
    "fsdp_activation_checkpointing",
    "selective_checkpointing",
    "use_torch_compile",
)
HEADER = ("checkpointing, compiled", "time of a step", "quartiles", "peak GiB", "FLOPs recomputed")


def with_levers(selective: str | None, compiled: bool, config: TrainConfig, turn: Turn) -> None:
    train(configured(config, selective, compiled), turn.before_step)


def configured(config: TrainConfig, selective: str | None, compiled: bool) -> TrainConfig:
    parallel = replace(
        config.parallel,
        fsdp_activation_checkpointing=selective is not None,
        selective_checkpointing=selective or "1",
        use_torch_compile=compiled,
    )
    return replace(config, parallel=parallel)


def main() -> None:
    flags, settings = parse(
        (__doc__ or "").splitlines()[0],
        OWN,
        rounds=Number(8, "turns of each that count"),
        steps=Number(4, "optimizer steps of a turn"),
    )
    levers = {
        name + (", compiled" if compiled else ""): (selective, compiled)
        for compiled in (False, True)
        for name, selective in CHECKPOINTING.items()
        if not compiled or selective in (None, "op", "1")
    }
    defaults = ON_GPU if torch.cuda.is_available() else ON_CPU
    total = (flags.rounds + 1) * flags.steps + 1
    config = read_settings([*RACE, *defaults, f"num_steps={total}", f"report_interval={flags.steps}", *settings])
    announce(flags)
    contenders = {name: partial(with_levers, *lever) for name, lever in levers.items()}
    table = Table(*HEADER)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        lanes = run_race(contenders, config, Path(folder), flags.rounds, flags.steps)
        for name, (selective, compiled) in levers.items():
            parallel = configured(config, selective, compiled).parallel
            share = recomputed_share(parallel, resolve_shape(config.model), config.data.seq_length)
            table.add(name, *ratio(lanes[name], lanes["none"]), peak_gib(Path(folder, name)), f"{share:.0%}")
    table.print()


def ratio(lane: Lane, plain: Lane) -> tuple[str, str]:
    """Of the times of neighbouring turns, median and quartiles."""
    return spread([ours / theirs for ours, theirs in zip(lane.seconds, plain.seconds, strict=True)], ".2f")


def peak_gib(run: Path) -> str:
    """Of the run's last report."""
    lines = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    return f"{json.loads(lines[-1])['memory_gib']:.2f}"


if __name__ == "__main__":
    main()
