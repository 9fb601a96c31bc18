"""Advice on settings that need less memory, for plans, refusals and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pretraining.config.training import ModelConfig, TrainConfig
from pretraining.config.variants import VARIANTS, LlamaShape, resolve_shape
from pretraining.estimate.costs import parameter_count
from pretraining.estimate.memory import Rank, estimate_memory
from pretraining.text import format_gib

SHORTEST = 128
"""Tokens of the shortest sequence to suggest."""
MOST_DOUBLINGS = 10
"""Doublings of the number of devices."""

Change = tuple[str, TrainConfig, LlamaShape, Rank]
"""Flags, the changed settings, the model's shape, the rank."""


def memory_advice(config: TrainConfig, shape: LlamaShape, rank: Rank, limit_bytes: float | None = None) -> list[str]:
    """Return flags that reduce memory, each with the memory per process that results.

    Args:
        limit_bytes: memory that the result must fit into; None = less than now.
    """
    limit = estimate_memory(config, shape, rank).total - 1 if limit_bytes is None else limit_bytes
    found = []
    for changes in _changes(config, shape, rank):
        for flags, changed, model, on_rank in changes:
            if (total := estimate_memory(changed, model, on_rank).total) <= limit:
                found.append(f"{flags} (about {format_gib(total)})")
                break
    return found


def _changes(config: TrainConfig, shape: LlamaShape, rank: Rank) -> Iterator[list[Change]]:
    """Yield a list per kind of change, smallest change first."""

    def change(flags: str, section: str, **values: Any) -> Change:
        changed = {section: replace(getattr(config, section), **values)}
        return flags, replace(config, **changed), shape, rank

    size, length = config.batch.batch_size, config.data.seq_length
    halves = [size >> times for times in range(1, size.bit_length())]
    yield [change(f"--batch_size={half}", "batch", batch_size=half) for half in halves]
    if not config.parallel.fsdp_activation_checkpointing:
        yield [change("--fsdp_activation_checkpointing=true", "parallel", fsdp_activation_checkpointing=True)]
    ranks = config.parallel.context_parallel_size
    sizes = [2**power for power in range(rank.shard_size.bit_length()) if rank.shard_size % 2**power == 0]
    yield [
        change(f"--context_parallel_size={size}", "parallel", context_parallel_size=size)
        for size in sizes
        if size > ranks and length % (2 * size) == 0
    ]
    noun = "GPUs" if rank.device_type == "cuda" else "machines"
    _, sharded, *_ = change("", "parallel", sharding_strategy="fsdp")
    counts = [rank.shard_size * 2**doublings for doublings in range(1, MOST_DOUBLINGS + 1)]
    yield [
        (f"{count} {noun} with --sharding_strategy=fsdp", sharded, shape, replace(rank, shard_size=count))
        for count in counts
    ]
    lengths = [length >> times for times in range(1, length.bit_length()) if length >> times >= SHORTEST]
    yield [change(f"--seq_length={half}", "data", seq_length=half) for half in lengths]
    variants = [
        (name, resolve_shape(ModelConfig(model_variant=name, vocab_size=shape.vocab_size))) for name in VARIANTS
    ]
    variants.sort(key=lambda variant: (parameter_count(variant[1]), variant[0]), reverse=True)
    yield [
        (f"--model_variant={name} --vocab_size={shape.vocab_size}", config, variant, rank)
        for name, variant in variants
        if parameter_count(variant) < parameter_count(shape)
    ]
