"""Every layout of parameters over processes starts from the same bits as one process, tied embeddings included."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_forked
from tiers import first_quick

WORKER = Path(__file__).with_name("initial_weights_worker.py")


@pytest.mark.parametrize(
    ("processes", "layouts"),
    first_quick(
        (1, [(1, 1)]),
        (2, [(2, 1), (1, 2)]),
        (3, [(3, 1), (1, 3)]),
        (4, [(4, 1), (2, 2), (1, 4)]),
        quick=2,
    ),
)
def test_ddp_fsdp_and_hsdp_start_like_one_process(processes: int, layouts: list[tuple[int, int]]) -> None:
    output = run_forked(WORKER, processes).stdout
    lines = [line for line in output.splitlines() if line.startswith("replicate=")]
    assert lines == [f"replicate={replicate} shard={shard}: same" for replicate, shard in layouts]
