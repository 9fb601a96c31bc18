"""docs/parallelism.md, "Where to begin, by model": each line fits by the memory estimate of runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pretraining.config.training import BatchConfig, DataConfig, ParallelConfig, TrainConfig
from pretraining.config.variants import VARIANTS
from pretraining.estimate.memory import Rank, estimate_memory

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
LINE = re.compile(
    r"\| (\S+) \| (\d+) \| (\d+) \| (?:`fsdp`, (\w+), (\d+)|(does not fit)) \| `hsdp`, (\d+), (\w+), (\d+) \| (\d+) \|"
)
ROWS = LINE.findall(PAGE.read_text(encoding="utf-8"))
MEMORY_GIB = 0.9 * 79.6


def gib(variant: str, seq_length: str, context: str, group: int, checkpointing: str, batch_size: int) -> float:
    config = replace(
        TrainConfig(),
        parallel=ParallelConfig(
            sharding_strategy="hsdp",
            context_parallel_size=int(context),
            fsdp_activation_checkpointing=checkpointing == "full",
        ),
        batch=BatchConfig(batch_size=batch_size),
        data=DataConfig(seq_length=int(seq_length)),
    )
    shape = VARIANTS[variant]
    return estimate_memory(config, shape, Rank(group, 2, "cuda")).total / 2**30


def test_the_table_is_there() -> None:
    assert len(ROWS) > 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_line_fits_and_says_how_much_it_takes(row: tuple[str, ...]) -> None:
    variant, seq_length, context, of_node, batch_of_node, _, group, checkpointing, batch, said = row
    taken = gib(variant, seq_length, context, int(group), checkpointing, int(batch))
    assert taken <= MEMORY_GIB and round(taken) == int(said)
    if of_node:
        assert (of_node, batch_of_node, group) == (checkpointing, batch, "8")
    else:
        assert gib(variant, seq_length, context, 8, "full", 1) > MEMORY_GIB
