"""Advice on memory: with the flags of a line, the estimate is what the line gives."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pretraining.config.read import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.estimate.advice import memory_advice
from pretraining.estimate.memory import Rank, estimate_memory

BASE = ["use_dummy_dataset=true", "model_variant=1b", "batch_size=8", "loss_chunk_tokens=0"]


def load(*flags: str) -> TrainConfig:
    return load_train_config([*BASE, *flags])


def gib(config: TrainConfig, shard_size: int = 1, device_type: str = "cuda") -> float:
    shape = resolve_shape(config.model)
    return estimate_memory(config, shape, Rank(shard_size, 2, device_type)).total / 2**30


def advice(config: TrainConfig, limit_gib: float | None, device_type: str = "cuda") -> dict[str, float]:
    limit = None if limit_gib is None else limit_gib * 2**30
    shape = resolve_shape(config.model)
    lines = memory_advice(config, shape, Rank(1, 2, device_type), limit)
    matches = [re.fullmatch(r"(.*) \(about ([\d,.]+) GiB\)", line) for line in lines]
    return {match[1]: float(match[2].replace(",", "")) for match in matches if match}


@pytest.mark.parametrize("limit_gib", [None, 60.0, 40.0, 20.0, 0.1])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_advice_fits_and_its_memory_is_right(limit_gib: float | None, device_type: str) -> None:
    config = load()
    found = advice(config, limit_gib, device_type)
    for flags, told in found.items():
        assert told <= (gib(config, 1, device_type) if limit_gib is None else limit_gib)
        if flags.startswith("--"):
            assert told == pytest.approx(gib(load(*flags[2:].split(" --")), 1, device_type), abs=0.06)
        else:
            sharded = replace(config, parallel=replace(config.parallel, sharding_strategy="fsdp"))
            assert told == pytest.approx(gib(sharded, int(flags.split()[0]), device_type), abs=0.06)
    assert bool(found) == (limit_gib != 0.1)
