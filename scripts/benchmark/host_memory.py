"""Tokens/s on a CPU with freed memory kept for the next step, as it is, against freed memory given back to the system.

python scripts/benchmark/host_memory.py
python scripts/benchmark/host_memory.py --mixed_precision=false --processes=2
"""

from __future__ import annotations

from common import parse, train_project
from race import Turn, race

from pretraining.config.training import TrainConfig
from pretraining.parallel import processes


def kept(config: TrainConfig, turn: Turn) -> None:
    train_project(config, turn.before_step)


def given_back(config: TrainConfig, turn: Turn) -> None:
    processes.keep_freed_memory = lambda: False  # a contender has a process of its own
    train_project(config, turn.before_step)


if __name__ == "__main__":
    flags, settings = parse(
        "Freed memory kept against freed memory given back.",
        rounds=(16, "turns of each that count"),
        steps=(10, "optimizer steps of a turn"),
        processes=(1, "of each contender, on this machine"),
    )
    race({"kept": kept, "given back": given_back}, settings, flags.rounds, flags.steps, flags.processes)
