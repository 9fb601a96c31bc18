"""Float8 where FSDP gathers the weights that are rounded, and reduces the gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_float8 import needs_torchao
from training_runs import losses_of, train_runs, write_dataset

WORKER = "float8_worker.py"
STRATEGIES = ("fsdp", "zero2", "ddp")
COMMON = ["mixed_precision=true", "num_steps=8", "warmup_steps=2", "global_batch_size=8", "batch_size=4"]
CHECKPOINTED = ["fsdp_activation_checkpointing=true", "selective_checkpointing=op"]


@pytest.fixture(scope="module")
def data_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "first")
    return folder


@needs_torchao
def test_two_processes_learn_as_one_does_and_leave_it_a_checkpoint(data_path: Path, tmp_path: Path) -> None:
    """Micro-batches are the same sequences in both, so scales are those of the same tensors."""
    for scaling in ("tensorwise", "rowwise"):
        flags = [*COMMON, f"float8={scaling}"]
        runs = {each: [*flags, f"sharding_strategy={each}"] for each in STRATEGIES}
        runs["stopped"] = [*flags, *CHECKPOINTED, "run_steps=4"]
        folders = {name: tmp_path / scaling / name for name in ("alone", *runs)}
        train_runs(1, data_path, [[*flags, f"ckpt_save_path={folders['alone']}"]], worker=WORKER)
        two = [[*run, f"ckpt_save_path={folders[name]}"] for name, run in runs.items()]
        train_runs(2, data_path, two, worker=WORKER)
        expected = losses_of(folders["alone"])
        for name in STRATEGIES:
            assert losses_of(folders[name]) == pytest.approx(expected, rel=1e-4), name
        train_runs(1, data_path, [[*COMMON, f"ckpt_save_path={folders['stopped']}"]])  # in bfloat16 from here on
        assert losses_of(folders["stopped"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about devices without float8")
def test_every_process_is_refused_with_the_same_words(data_path: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failure:
        train_runs(2, data_path, [[*COMMON, "float8=rowwise", f"ckpt_save_path={tmp_path}/run"]])
    assert str(failure.value).count("ConfigError: --float8=rowwise needs a GPU with units for float8") == 2
    assert not (tmp_path / "run").exists()
