"""Tokens/s of the project against torchtitan 0.2.2: its Llama 3 model and its Trainer, on one GPU or several.

    pip install torchtitan==0.2.2        (in a separate environment: it installs many packages)
    python -m scripts.benchmark.compare.against_torchtitan
    python -m scripts.benchmark.compare.against_torchtitan --model_variant=1b --seq_length=4096 --batch_size=4 \
        --use_torch_compile=true

Both start from the same weights and train the same shape on the same micro-batches, with fused AdamW, gradient clipping
and SDPA attention. Precision, checkpointed blocks and compiled blocks are the same. Both report every 10 steps, and
neither evaluates or saves. Equal losses at the end show that both did the same work. torchtitan has its rows in memory
and writes no curves. If blocks are compiled, torchtitan also compiles the loss, which is its default.

torchtitan's Trainer needs a GPU, and so does this benchmark.
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
    """Return why the settings cannot be compared; None = they can."""
    shape, parallel = resolve_shape(config.model), config.parallel
    if shape.tie_word_embeddings:
        return "torchtitan's Llama 3 has an untied head: set --tie_word_embeddings=false"
    if not parallel.selective_checkpointing.isdigit():
        return f"--selective_checkpointing={parallel.selective_checkpointing} is not supported: set a whole number"
    if parallel.sharding_strategy not in ("ddp", "fsdp", "zero2"):
        return f"--sharding_strategy={parallel.sharding_strategy} is not supported: set ddp, fsdp or zero2"
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "not installed"
    if installed != VERSION:  # other versions sum losses differently and divide by other counts
        return f"needs torchtitan {VERSION}, and torchtitan is {installed}: pip install torchtitan=={VERSION}"
    return None if torch.cuda.is_available() else "there is no GPU, which torchtitan's Trainer needs"


if __name__ == "__main__":
    flags, settings = parse_race("The project against torchtitan.")
    if reason := obstacle(race_settings(settings, flags)):
        sys.exit(f"error: {reason}")
    print(f"against   torchtitan {VERSION}")
    race({"project": project, "torchtitan": torchtitan}, settings, flags)
