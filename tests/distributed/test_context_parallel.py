"""Context parallelism: ranks that share sequences train as one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import first_quick
from training_runs import EVERY_SWITCH, losses_of, metrics_of, train_runs

# Ten steps on two datasets, whose documents end at places that no chunk knows of, and an evaluation of each.
COMMON = [
    *("datasets=first,second", "weights=3,1", "num_steps=10", "global_batch_size=4", "batch_size=2"),
    *("held_out_fraction=0.1", "eval_interval=5", "eval_batches=3"),
]
KINDS = {
    "stream": [],
    "masked": ["document_mask=true"],
    "best_fit": ["packing=best_fit"],
    "best_fit_masked": ["packing=best_fit", "document_mask=true"],
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
TIMES = ("seconds", "per_", "share", "gib")  # parts of the names of values that each run has of its own


def assert_same_reports(run: Path, expected: Path) -> None:
    """Every reported number of two runs is the same, evaluations included, to rounding in float32."""
    lines, others = (
        [
            {
                name: each
                for name, each in line.items()
                if isinstance(each, float) and not any(part in name for part in TIMES)
            }
            for line in metrics_of(path)
        ]
        for path in (run, expected)
    )
    assert len(lines) == 12 and {"grad_norm", "loss/second", "token_accuracy"} <= lines[0].keys()
    assert any("evaluation_loss/second" in line for line in lines)
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=2e-5), run.name


@pytest.mark.parametrize("processes", first_quick(2, 4))
def test_ranks_that_share_sequences_report_what_one_process_does(
    processes: int, data_path: Path, tmp_path: Path
) -> None:
    train_runs(1, data_path, [[*COMMON, *kind, f"ckpt_save_path={tmp_path / name}"] for name, kind in KINDS.items()])
    layouts = LAYOUTS[processes]
    runs = [(f"{name}_{layout}", [*KINDS[name], *layouts[layout]]) for name in KINDS for layout in layouts]
    train_runs(processes, data_path, [[*COMMON, *flags, f"ckpt_save_path={tmp_path / name}"] for name, flags in runs])
    for name in KINDS:
        for layout in layouts:
            assert_same_reports(tmp_path / f"{name}_{layout}", tmp_path / name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "of_both"),
    [
        (["fsdp_activation_checkpointing=true"], ["document_mask=true", "z_loss_weight=1e-3"]),
        (["fsdp_activation_checkpointing=true", "selective_checkpointing=op"], ["document_mask=true"]),
        (["use_torch_compile=true", "fsdp_activation_checkpointing=true"], ["loss_chunk_tokens=8"]),
        (["use_torch_compile=true", "sharding_strategy=zero2"], []),
        ([], [*EVERY_SWITCH, "document_mask=true"]),
    ],
    ids=["recomputed", "op", "compiled and recomputed", "compiled", "every switch"],
)
def test_other_settings_hold_with_shared_sequences(
    flags: list[str], of_both: list[str], data_path: Path, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    train_runs(1, data_path, [[*COMMON, *of_both, f"ckpt_save_path={alone}"]])
    train_runs(2, data_path, [[*COMMON, *of_both, *flags, "context_parallel_size=2", f"ckpt_save_path={shared}"]])
    assert_same_reports(shared, alone)


@pytest.mark.thorough
def test_a_run_resumes_with_another_number_of_ranks_per_sequence(data_path: Path, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train_runs(1, data_path, [[*COMMON, f"ckpt_save_path={whole}"]])
    stages = [(4, "context_parallel_size=2", 3), (2, "context_parallel_size=1", 3), (2, "context_parallel_size=2", 4)]
    worlds = []
    for processes, flag, steps in stages:
        train_runs(processes, data_path, [[*COMMON, flag, f"run_steps={steps}", f"ckpt_save_path={moved}"]])
        done = len(losses_of(moved))
        manifest = json.loads((moved / "checkpoints" / f"step_{done}_ckp" / "manifest.json").read_text())
        worlds.append((manifest["world"]["processes"], manifest["world"].get("context_parallel_size")))
    assert worlds == [(4, 2), (2, None), (2, 2)]
    assert losses_of(moved) == pytest.approx(losses_of(whole), rel=2e-5)
