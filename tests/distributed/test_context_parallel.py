"""Context parallelism: ranks that share sequences train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers import first_quick
from training_runs import losses_of, reports_of, train_runs

# Ten steps on documents that are cut at places which no chunk knows of.
COMMON = ["num_steps=10", "global_batch_size=4", "batch_size=2", "held_out_fraction=0.1", "eval_interval=5"]
KINDS = {
    "stream": [],
    "masked": ["document_mask=true"],
    "best_fit": ["packing=best_fit", "document_mask=true"],
    "best_fit_open": ["packing=best_fit"],
}
LAYOUTS = {
    2: {"fsdp": ["context_parallel_size=2"]},
    4: {
        "fsdp_2": ["context_parallel_size=2"],
        "fsdp_4": ["context_parallel_size=4"],
        "hsdp_2": ["context_parallel_size=2", "sharding_strategy=hsdp", "hsdp_group_size=2"],
        "ddp_4": ["context_parallel_size=4", "sharding_strategy=ddp"],
    },
}


@pytest.mark.parametrize("processes", first_quick(2, 4))
def test_ranks_that_share_sequences_have_the_losses_of_one_process(
    processes: int, data_path: Path, tmp_path: Path
) -> None:
    train_runs(1, data_path, [[*COMMON, *kind, f"ckpt_save_path={tmp_path / name}"] for name, kind in KINDS.items()])
    layouts = LAYOUTS[processes].items()
    runs = [(f"{name}_{layout}", [*kind, *flags]) for name, kind in KINDS.items() for layout, flags in layouts]
    train_runs(processes, data_path, [[*COMMON, *flags, f"ckpt_save_path={tmp_path / name}"] for name, flags in runs])
    for name in KINDS:
        for layout, _ in layouts:
            shared, alone = tmp_path / f"{name}_{layout}", tmp_path / name
            print(
                name,
                layout,
                max(abs(a / b - 1) for a, b in zip(losses_of(shared), losses_of(alone), strict=True)),
                max(
                    abs(a["grad_norm"] / b["grad_norm"] - 1)
                    for a, b in zip(reports_of(shared), reports_of(alone), strict=True)
                ),
            )
            assert losses_of(shared) == pytest.approx(losses_of(alone), rel=2e-5), (name, layout)
