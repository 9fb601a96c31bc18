"""Float8 where FSDP gathers the weights that are rounded, and reduces the gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated_float8 import needs_torchao
from training_runs import losses_of, train_runs, write_dataset

SCALINGS = ("tensorwise", "rowwise")
STRATEGIES = ("fsdp", "zero2", "ddp")
COMMON = ["mixed_precision=true", "num_steps=4", "warmup_steps=2", "global_batch_size=8", "batch_size=4"]
CHECKPOINTED = ["fsdp_activation_checkpointing=true", "selective_checkpointing=op"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "first")
    return folder


@pytest.mark.thorough
@needs_torchao
def test_two_processes_learn_like_one_and_save_a_checkpoint_for_it(data_path: Path, tmp_path: Path) -> None:
    """Micro-batches are the same sequences in both, so scales are those of the same tensors."""
    alone: list[list[str]] = []
    together: list[list[str]] = []
    stopped: list[list[str]] = []
    for scaling in SCALINGS:
        flags, run = [*COMMON, f"float8={scaling}"], f"ckpt_save_path={tmp_path}/{scaling}"
        alone.append([*flags, f"{run}_alone"])
        together += [[*flags, f"sharding_strategy={each}", f"{run}_{each}"] for each in STRATEGIES]
        together.append([*flags, *CHECKPOINTED, "run_steps=2", f"{run}_stopped"])
        stopped.append([*COMMON, f"{run}_stopped"])
    train_runs(1, data_path, alone)
    train_runs(2, data_path, together)
    train_runs(1, data_path, stopped)  # in bfloat16 from here on
    for scaling in SCALINGS:
        expected = losses_of(tmp_path / f"{scaling}_alone")
        for strategy in STRATEGIES:
            assert losses_of(tmp_path / f"{scaling}_{strategy}") == pytest.approx(expected, rel=1e-4), strategy
        assert losses_of(tmp_path / f"{scaling}_stopped") == pytest.approx(expected, rel=1e-3)
