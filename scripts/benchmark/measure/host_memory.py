"""Tokens/s on a CPU with freed memory kept for the next step, as it is, against freed memory given back to the system.

python -m scripts.benchmark.measure.host_memory
python -m scripts.benchmark.measure.host_memory --mixed_precision=false --processes=2
"""

from __future__ import annotations

from pretraining.config.training import TrainConfig
from pretraining.distributed import processes
from scripts.benchmark.race import Turn, parse_race, project, race


def given_back(config: TrainConfig, turn: Turn) -> None:
    processes.keep_freed_memory = lambda: False  # a contender has a process of its own
    project(config, turn)


if __name__ == "__main__":
    flags, settings = parse_race("Freed memory kept against freed memory given back.")
    race({"kept": project, "given back": given_back}, settings, flags)
