"""Every layout starts from the same bits as one process, and takes what is estimated of memory, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked
from tiers import first_quick

WORKER = Path(__file__).with_name("layout_worker.py")
STRATEGIES = ("ddp", "zero2", "fsdp", "hsdp", "hsdp_zero2")
OPTIMIZERS = ("adamw", "nadam", "rmsprop", "sgd", "sgdm", "normalized_sgdm", "muon")


@pytest.mark.parametrize("processes", first_quick(1, 2, 3, 4, quick=2))
def test_every_strategy_and_optimizer_starts_alike_and_takes_what_is_estimated(processes: int) -> None:
    group = ["hsdp_group_size=2"] if processes == 4 else []
    cases = [[f"sharding_strategy={each}", *(group * each.startswith("hsdp"))] for each in STRATEGIES]
    cases += [[f"optimizer={each}", "mixed_precision=true"] for each in OPTIMIZERS]
    cases += [["tie_word_embeddings=true"], ["tie_word_embeddings=true", "fsdp_activation_checkpointing=true"]]
    output = run_forked(WORKER, processes, [json.dumps(cases)]).stdout
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [each["measured"] for each in found] == [each["estimated"] for each in found]
    assert [each["same"] for each in found] == [True] * len(cases)
