"""The estimate of memory beside a step of the real model on devices that are not there (simulate.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked

pytestmark = pytest.mark.thorough

WORKER = Path(__file__).with_name("simulate_worker.py")
SMALL = (
    *("model_variant=tiny", "hidden_size=64", "intermediate_size=176", "num_attention_heads=4"),
    *("num_key_value_heads=2", "vocab_size=512", "gpus=8"),
)
CHECKPOINTING = "fsdp_activation_checkpointing=true"
SHALLOW, DEEP = ("num_hidden_layers=2", "seq_length=256", "batch_size=2"), ("num_hidden_layers=8", "seq_length=256")
STATE = ("parameters", "gradients", "optimizer state")
STRATEGIES = (
    *(("sharding_strategy=ddp",), ("sharding_strategy=zero2",), ("sharding_strategy=fsdp",)),
    *(("sharding_strategy=hsdp", "hsdp_group_size=4"), ("sharding_strategy=hsdp_zero2", "hsdp_group_size=2")),
)
LAYOUTS = [*STRATEGIES, *((*each, "grad_accum_steps=3") for each in (STRATEGIES[0], STRATEGIES[3]))]
OPTIMIZERS = [(f"optimizer={each}",) for each in ("nadam", "normalized_sgdm", "muon")]
LEVERS = [
    *((CHECKPOINTING,), (CHECKPOINTING, "selective_checkpointing=2"), (CHECKPOINTING, "selective_checkpointing=op")),
    *(("vocab_size=4000",), ("num_key_value_heads=4", "batch_size=5"), ("loss_chunk_tokens=100",), ("gpus=1",)),
]
CASES = {(*SHALLOW, *case): None for case in (*LAYOUTS, *OPTIMIZERS, *LEVERS)}
PATTERNS = [(), (CHECKPOINTING, "selective_checkpointing=1/2")]


def simulated(cases: Iterable[tuple[str, ...]], fewest_blocks: int = 4) -> list[dict[str, Any]]:
    """Simulates plans in a process of their own: other tests must not meet a process group that is not there."""
    flags = [list({flag.partition("=")[0]: flag for flag in (*SMALL, *case)}.values()) for case in cases]
    output = run_forked(WORKER, 1, [json.dumps(flags), str(fewest_blocks)]).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == len(flags)
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, ...], dict[str, Any]]:
    """All shallow cases, simulated in one process."""
    return dict(zip(CASES, simulated(CASES), strict=True))


def off(simulation: dict[str, Any], name: str) -> float:
    estimated, there = simulation["parts"][name]
    return float(abs(estimated / there - 1))


@pytest.mark.parametrize("case", [*LAYOUTS, *OPTIMIZERS], ids=" ".join)
def test_the_state_is_exact_and_the_peak_close(case: tuple[str, ...], found: dict[tuple[str, ...], Any]) -> None:
    simulation = found[(*SHALLOW, *case)]
    assert all(estimated == there for estimated, there in (simulation["parts"][name] for name in STATE))
    assert off(simulation, "at the peak") < 0.05, simulation


@pytest.mark.parametrize("case", LEVERS, ids=" ".join)
def test_activations_are_those_that_the_estimate_counts(
    case: tuple[str, ...], found: dict[tuple[str, ...], Any]
) -> None:
    assert off(found[(*SHALLOW, *case)], "activations, loss") < 0.05
    assert off(found[(*SHALLOW, *case)], "at the peak") < 0.05


def test_a_few_blocks_say_what_all_would_take() -> None:
    cases = [(*DEEP, *pattern) for pattern in PATTERNS]
    for extended, whole in zip(simulated(cases), simulated(cases, fewest_blocks=8), strict=True):
        assert extended["depths"] == [4, 6] and whole["depths"] == [8]
        assert extended["total"] == pytest.approx(whole["total"], rel=0.002)
        assert extended["largest"] == pytest.approx(whole["largest"], rel=0.002)
        assert extended["peak_moment"] == whole["peak_moment"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("fsdp_activation_checkpointing=true",), ("sharding_strategy=hsdp",)])
def test_the_estimate_holds_for_a_70b_on_1024_gpus(flags: tuple[str, ...]) -> None:
    large = ("model_variant=70b", "gpus=1024", "batch_size=1", "seq_length=8192", *flags)
    found = json.loads(run_forked(WORKER, 1, [json.dumps([large]), "4"]).stdout.splitlines()[-1])
    assert found["depths"] == [4, 6]
    assert off(found, "parameters") == 0 and off(found, "at the peak") < 0.05
