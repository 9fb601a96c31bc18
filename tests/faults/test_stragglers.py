"""One process is slow, and all others wait for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from guarded_runs import train_with_faults


def test_the_slow_rank_is_named_with_its_factor(
    data_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies = ("fsdp", "ddp")
    runs = [
        ["num_steps=30", "report_interval=30", f"sharding_strategy={strategy}", f"ckpt_save_path={tmp_path / strategy}"]
        for strategy in strategies
    ]
    train_with_faults(2, data_path, [("slow_forward", run) for run in runs])
    lines = [line for line in capsys.readouterr().out.splitlines() if "straggler" in line]
    assert len(lines) == len(strategies)
    for line in lines:
        match = re.search(r"straggler: rank 1 on \S+: [\d.]+ s of own work per step,.* ([\d.]+) times", line)
        assert match, line
        assert float(match[1]) >= 1.5
