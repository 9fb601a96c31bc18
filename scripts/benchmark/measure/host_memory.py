"""Tokens/s on a CPU that keeps freed memory for the next step (the default), against returning it to the system.

python -m scripts.benchmark.measure.host_memory
python -m scripts.benchmark.measure.host_memory --mixed_precision=false --processes=2
"""

from __future__ import annotations

from pretraining.config.training import TrainConfig
from pretraining.distributed import processes
from scripts.benchmark.race import Turn, parse_race, project, race


def given_back(config: TrainConfig, turn: Turn) -> None:
    processes.keep_freed_memory = lambda: False  # affects only the process of this contender
    project(config, turn)


if __name__ == "__main__":
    flags, settings = parse_race("Freed memory kept against freed memory returned to the system.")
    race({"kept": project, "given back": given_back}, settings, flags)
