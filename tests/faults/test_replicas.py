"""One bit of one weight flips on one of several replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
from guarded_runs import train_with_faults
from tiers import first_quick

RUN = ["num_steps=8", "replica_check_interval=2", "report_interval=0", "batch_size=1"]


@pytest.mark.parametrize(
    ("processes", "strategy", "named"),
    first_quick(
        (3, ["sharding_strategy=ddp"], {1: [0, 2]}),
        (4, ["sharding_strategy=hsdp", "hsdp_group_size=2"], {1: [3], 3: [1]}),
    ),
)
def test_the_rank_whose_weights_differ_is_named_by_all(
    processes: int, strategy: list[str], named: dict[int, list[int]], data_path: Path, tmp_path: Path
) -> None:
    runs = [
        ("no_fault", [*RUN, *strategy, f"ckpt_save_path={tmp_path / 'good'}"]),
        ("flip_weight_bit", [*RUN, *strategy, "checkpoint_interval=2", f"ckpt_save_path={tmp_path / 'run'}"]),
    ]
    endings = train_with_faults(processes, data_path, runs)
    assert not any("error" in ending for ending in endings if ending["fault"] == "no_fault")
    errors = {ending.get("error") for ending in endings if ending["fault"] == "flip_weight_bit"}
    assert len(errors) == 1
    error = errors.pop()
    assert error is not None and error.startswith("HardwareError: step 4")
    lines = [line for line in error.splitlines() if line.startswith("  rank")]
    assert len(lines) == len(named)
    for line, (rank, others) in zip(lines, named.items(), strict=True):
        assert line.startswith(f"  rank {rank} on ")
        assert line.endswith(f"differs from rank {', '.join(map(str, others))}")
    # What was found wrong is not saved.
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_2_ckp"]
