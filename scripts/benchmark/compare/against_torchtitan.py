"""Tokens/s of the project against torchtitan 0.2.2: its Llama 3 model and its Trainer, on one GPU or several.

    pip install torchtitan==0.2.2        (in an environment of its own: it brings many packages)
    python -m scripts.benchmark.compare.against_torchtitan
    python -m scripts.benchmark.compare.against_torchtitan --model_variant=1b --seq_length=4096 --batch_size=4 \
        --use_torch_compile=true

Both start from the same weights and train the same shape on the same micro-batches, with fused AdamW, gradient
clipping, SDPA attention, in the same precision, with the same blocks checkpointed and compiled, and report every 10
steps; the losses at the end show that the work was the same. Nobody evaluates or saves. torchtitan has its rows in
memory and writes no curves; where blocks are compiled, it compiles its loss, too, as is its default.

torchtitan's Trainer computes on a GPU alone, so this needs one.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from scripts.benchmark.race import Turn, parse_race, project, race, race_settings

VERSION = "0.2.2"


def torchtitan(config: TrainConfig, turn: Turn) -> None:
    from scripts.benchmark.compare import torchtitan_trainer

    torchtitan_trainer.train(config, turn)


def obstacle(config: TrainConfig) -> str | None:
    """Why this cannot be compared; None = it can."""
    shape, parallel = resolve_shape(config.model), config.parallel
    if shape.tie_word_embeddings:
        return "torchtitan's Llama 3 has a head of its own: --tie_word_embeddings=false"
    if not parallel.selective_checkpointing.isdigit():
        return f"--selective_checkpointing={parallel.selective_checkpointing} is not compared; every k-th block is"
    if parallel.sharding_strategy not in ("ddp", "fsdp", "zero2"):
        return f"--sharding_strategy={parallel.sharding_strategy} is not compared; ddp, fsdp and zero2 are"
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "not there"
    if installed != VERSION:  # others sum losses in other ways, and divide by other counts
        return f"torchtitan {VERSION} is asked for, and torchtitan is {installed}: pip install torchtitan=={VERSION}"
    return None if torch.cuda.is_available() else "no GPU here, and torchtitan's Trainer computes on nothing else"


if __name__ == "__main__":
    flags, settings = parse_race("The project against torchtitan.")
    if reason := obstacle(race_settings(settings, flags)):
        sys.exit(f"error: {reason}")
    print(f"against   torchtitan {VERSION}")
    race({"project": project, "torchtitan": torchtitan}, settings, flags)
