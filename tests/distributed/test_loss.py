"""The loss in chunks, whose head FSDP gathers and whose gradients FSDP reduces."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import metrics_of, train_runs

STRATEGIES = ("ddp", "zero2", "fsdp")


@pytest.mark.thorough
def test_a_tied_head_with_z_loss_in_chunks_learns_the_same_on_any_layout(data_path: Path, tmp_path: Path) -> None:
    flags = ["num_steps=6", "tie_word_embeddings=true", "z_loss_weight=0.01", "loss_chunk_tokens=5"]
    flags += ["global_batch_size=4", "batch_size=1", "held_out_fraction=0.1", "eval_interval=2", "eval_batches=1"]
    train_runs(1, data_path, [[*flags, f"ckpt_save_path={tmp_path}/alone"]])
    runs = [[*flags, f"sharding_strategy={each}", f"ckpt_save_path={tmp_path}/{each}"] for each in STRATEGIES]
    train_runs(2, data_path, runs)
    expected = numbers_of(tmp_path / "alone")
    assert len(expected) > 15 and not expected["6 z_loss"] == expected["1 z_loss"] > 0
    for strategy in STRATEGIES:
        assert numbers_of(tmp_path / strategy) == pytest.approx(expected, rel=1e-4), strategy


def numbers_of(run: Path) -> dict[str, float]:
    """Losses, accuracies and gradient norms of a run's reports and evaluations, by step."""
    lines = metrics_of(run)
    names = ("loss", "z_loss", "grad_norm", "token_accuracy", "loss/first", "loss/second", "evaluation_loss")
    return {f"{line['step']} {name}": line[name] for line in lines for name in names if name in line}
