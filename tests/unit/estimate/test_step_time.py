"""The time of a step agrees with published runs, and each setting changes it in the right direction."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretraining.config.batch_sizes import resolve_batch_sizes
from pretraining.config.strategies import DimSizes
from pretraining.config.training import BatchConfig, DataConfig, ParallelConfig, TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.estimate.devices import GPUS
from pretraining.estimate.step_time import Cluster, StepTime, estimate_step_time

PAGE = Path(__file__).parents[3] / "docs" / "planner.md"
ROW = re.compile(r"\| (h100|a100) \| (\w+) \| ([\d,]+) \| ([\d,]+) \| ([+-][\d.]+)% \| (fitted|held out) \|")
CLUSTERS = {"h100": (96, 800.0), "a100": (128, 400.0)}
"""GPUs and Gbit/s of the machines that the page names."""
PUBLISHED = ROW.findall(PAGE.read_text(encoding="utf-8"))


def step_time(
    variant: str,
    cluster: Cluster,
    shard_size: int,
    *,
    batch: BatchConfig | None = None,
    seq_length: int = 4096,
    **parallel: Any,
) -> StepTime:
    config = replace(TrainConfig(), parallel=ParallelConfig(**parallel), data=DataConfig(seq_length=seq_length))
    plan = resolve_batch_sizes(batch or BatchConfig(batch_size=2), cluster.gpus)
    gpus = cluster.gpus
    dims = DimSizes(
        world=gpus, node=cluster.gpus_per_node, replicate=gpus // shard_size, shard=shard_size, context=1, data=gpus
    )
    return estimate_step_time(config, VARIANTS[variant], plan, cluster, dims)


def predicted(gpu: str, gpus: int, network: float, variant: str) -> float:
    """Return tokens/s per GPU: 7b with hsdp on nodes of 8, others with fsdp; every third block checkpointed."""
    cluster = Cluster(GPUS[gpu], gpus, 8, network)
    if variant == "7b":
        time = step_time(variant, cluster, 8, sharding_strategy="hsdp")
    else:
        time = step_time(variant, cluster, gpus, fsdp_activation_checkpointing=True, selective_checkpointing="1/3")
    return 2 * 4096 / time.total


def test_published_runs_are_predicted_as_the_page_says() -> None:
    errors: dict[str, list[float]] = {"fitted": [], "held out": []}
    assert len(PUBLISHED) == 8
    for gpu, variant, published, shown, error, role in PUBLISHED:
        speed = predicted(gpu, *CLUSTERS[gpu], variant)
        assert f"{speed:,.0f}" == shown
        off = speed / float(published.replace(",", "")) - 1
        assert f"{100 * off:+.1f}" == error
        errors[role].append(abs(off))
    assert [len(each) for each in errors.values()] == [4, 4]
    assert statistics.median(errors["held out"]) <= 0.15 and max(errors["held out"]) <= 0.30


NODE = Cluster(GPUS["h100"], 8, 8, 3200)


def test_recomputing_costs_the_repeated_operations() -> None:
    plain = step_time("7b", NODE, 8)
    full = step_time("7b", NODE, 8, fsdp_activation_checkpointing=True)
    per_operation = step_time("7b", NODE, 8, fsdp_activation_checkpointing=True, selective_checkpointing="op")
    assert plain.recompute == per_operation.recompute == 0
    assert full.compute == pytest.approx(plain.compute + full.recompute) and full.recompute > 0.2 * plain.compute


def test_a_slow_network_adds_exposed_time() -> None:
    fast, slow = (step_time("7b", Cluster(GPUS["h100"], 64, 8, gbits), 64) for gbits in (3200, 100))
    assert fast.exposed == 0 and fast.hidden > 0
    assert slow.exposed > slow.compute and slow.total == pytest.approx(slow.compute + slow.unhidden + slow.exposed)


def test_accumulation_sends_gradients_between_replicas_once() -> None:
    cluster = Cluster(GPUS["a100"], 16, 8, 10)
    one = step_time("1b", cluster, 1, sharding_strategy="ddp")
    four = step_time("1b", cluster, 1, sharding_strategy="ddp", batch=BatchConfig(batch_size=2, grad_accum_steps=4))
    assert four.compute == pytest.approx(4 * one.compute)
    assert four.exposed + four.hidden == pytest.approx(one.exposed + one.hidden)


def test_zero2_gathers_once_a_step() -> None:
    batch = BatchConfig(batch_size=2, grad_accum_steps=4)
    times = [step_time("7b", NODE, 8, batch=batch, sharding_strategy=each) for each in ("fsdp", "zero2")]
    fsdp, zero2 = (time.exposed + time.hidden for time in times)
    assert zero2 / fsdp == pytest.approx((2 + 4 * 4) / (8 * 2 + 4 * 4))
