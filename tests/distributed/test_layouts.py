"""Every layout starts from the same bits as one process, and takes what is estimated of memory, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked import run_forked
from tiers import first_quick
from training_runs import EVERY_SWITCH

WORKER = Path(__file__).with_name("layout_worker.py")
STRATEGIES = ("ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2")
OPTIMIZERS = ("adamw", "nadam", "rmsprop", "sgd", "sgdm", "normalized_sgdm", "muon")
LAYOUTS = {
    **{strategy: [f"sharding_strategy={strategy}"] for strategy in STRATEGIES},
    **{optimizer: [f"optimizer={optimizer}", "mixed_precision=true"] for optimizer in OPTIMIZERS},
    "every switch": EVERY_SWITCH,
    "tied": ["tie_word_embeddings=true"],
    "tied, recomputed": ["tie_word_embeddings=true", "fsdp_activation_checkpointing=true"],
}


@pytest.fixture(scope="module", params=first_quick(1, 2, 3, 4, quick=2), ids="{} processes".format)
def starts(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """What each layout started with; one process group builds all of them."""
    group = ["hsdp_group_size=2"] if request.param == 4 else []
    cases = [[*flags, *(group * name.startswith("hsdp"))] for name, flags in LAYOUTS.items()]
    output = run_forked(WORKER, request.param, [json.dumps(cases)], check=False).stdout
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {"output": {"text": output}, **dict(zip(LAYOUTS, lines, strict=False))}  # the group ends at the first error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_starts_like_one_process_in_the_estimated_memory(
    starts: dict[str, dict[str, Any]], layout: str
) -> None:
    assert layout in starts, starts["output"]["text"]
    assert starts[layout]["measured"] == starts[layout]["estimated"]
    assert starts[layout]["same"]
