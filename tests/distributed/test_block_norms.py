"""Norms by block are those of one process under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import metrics_of, train_runs, write_two_datasets

pytestmark = pytest.mark.thorough

LAYOUTS = {
    2: [
        ["sharding_strategy=fsdp"],
        ["sharding_strategy=ddp"],
        ["sharding_strategy=zero2"],
        ["context_parallel_size=2"],
    ],
    4: [["sharding_strategy=hsdp", "hsdp_group_size=2", "document_mask=true"]],
}


def norms_of(run: Path) -> dict[str, float]:
    lines = metrics_of(run, "norms/grad/embed")
    return {f"{line['step']} {name}": line[name] for line in lines for name in line if name.startswith("norms/")}


def test_norms_are_equal_under_every_strategy_and_number_of_processes(tmp_path: Path) -> None:
    data = write_two_datasets(tmp_path / "data")
    common = ["num_steps=4", "norms_interval=2", "global_batch_size=8", "batch_size=2", "datasets=first,second"]
    train_runs(
        1,
        data,
        [
            [*common, f"ckpt_save_path={tmp_path}/{kind}", *more]
            for kind, more in (("plain", []), ("masked", ["document_mask=true"]))
        ],
    )
    expected = {kind: norms_of(tmp_path / kind) for kind in ("plain", "masked")}
    assert len(expected["plain"]) == 2 * (4 * 6 + 5)
    for processes, layouts in LAYOUTS.items():
        runs = [tmp_path / f"{processes}-{number}" for number in range(len(layouts))]
        train_runs(
            processes,
            data,
            [[*common, *more, f"ckpt_save_path={run}"] for run, more in zip(runs, layouts, strict=True)],
        )
        for run, more in zip(runs, layouts, strict=True):
            kind = "masked" if "document_mask=true" in more else "plain"
            assert norms_of(run) == pytest.approx(expected[kind], rel=1e-5), more
