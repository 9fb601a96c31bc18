"""A run logs its estimated memory first, refuses a model that cannot fit, and explains when memory runs out."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import status_of
from unit.train.whole_runs import refusal

from pretraining.checkpoint import pt_files
from pretraining.config.read import load_train_config
from pretraining.config.strategies import DimSizes
from pretraining.config.variants import resolve_shape
from pretraining.data.batch import StepBatch
from pretraining.distributed.processes import Processes
from pretraining.errors import CheckpointError, ConfigError, OutOfMemoryError
from pretraining.launch.machine import MachineMemory
from pretraining.text import format_gib
from pretraining.train import loop, memory_check
from pretraining.train.memory_check import check_memory, is_out_of_memory
from pretraining.train.step import StepContext, train_step

GIB = 2**30
ALONE = DimSizes(world=1, node=1, replicate=1, shard=1, context=1, data=1)


def check(gib: float, *flags: str, processes: int = 1, shard_size: int = 1) -> None:
    """Check a float32 run on a machine with this much memory."""
    config = load_train_config(["use_dummy_dataset=true", "mixed_precision=false", *flags])
    here = Processes(0, processes, 0, processes, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        found = MachineMemory(int(gib * GIB), int(2 * gib * GIB), "this machine")
        for module in (memory_check, pt_files):
            patch.setattr(module, "machine_memory", lambda: found)
        dims = DimSizes(world=shard_size, node=processes, replicate=1, shard=shard_size, context=1, data=shard_size)
        check_memory(config, resolve_shape(config.model), dims, here)


@pytest.mark.parametrize(
    ("gib", "flags", "would_fit"),
    [
        (24, "model_variant=llama3_8b batch_size=1 seq_length=1024 vocab_size=32000", "--model_variant=llama3.2_1b"),
        (15.5, "model_variant=125m batch_size=64 seq_length=1024", "--batch_size=8 (about 8.6 GiB)"),
        (5, "model_variant=125m batch_size=64 seq_length=1024", "--batch_size=2 (about "),
        (0.1, "model_variant=tiny batch_size=1 seq_length=64", "No smaller"),
    ],
)
def test_a_model_that_cannot_fit_is_refused_with_settings_that_would(gib: float, flags: str, would_fit: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(would_fit)) as refused:
        check(gib, *flags.split())
    assert {"batch_size", "seq_length", "ignore_memory"} <= set(refused.value.settings)


def test_data_of_a_store_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    model = (
        "model_variant=tiny",
        "batch_size=1",
        "seq_length=64",
        "use_dummy_dataset=false",
        "data_path=s3://bucket/t",
    )
    check(8, *model, "data_cache_size=4GB", processes=2)
    with pytest.raises(ConfigError, match=r"--data_cache_size=8GiB of data in memory do not fit in the 8\.0 GiB"):
        check(8, *model, "data_cache_size=8GiB", processes=2)
    check(8, *model, "data_cache_size=8GiB", f"data_cache_path={tmp_path}", processes=2)


def test_a_run_whose_full_checkpoints_cannot_be_gathered_is_refused() -> None:
    model = ("model_variant=125m", "batch_size=1", "seq_length=256")
    flags = (*model, "ckpt_format=full", "ckpt_save_path=run")  # 12 bytes per parameter
    check(1.4, *flags, "ignore_memory=true", processes=2, shard_size=2)
    check(12, *flags, shard_size=8)
    with pytest.raises(CheckpointError) as refused:
        check(1.4, *flags, shard_size=8)
    assert set(refused.value.settings) == {"ckpt_format", "ignore_memory"}
    with pytest.raises(ConfigError):  # a single CPU process gathers nothing, and the model itself is too large
        check(1.4, *flags)


@pytest.mark.parametrize(
    ("fits", "too_small", "flags", "processes"),
    [
        (43, 42, "batch_size=64 seq_length=1024", 1),  # within the error of the estimate, 50.4 GiB
        (64, 8, "batch_size=1 seq_length=256 sharding_strategy=ddp", 8),  # processes of a machine share its memory
    ],
)
def test_the_limit_is_below_the_estimate_and_the_user_may_know_better(
    fits: int, too_small: int, flags: str, processes: int
) -> None:
    given = ("model_variant=125m", *flags.split())
    check(fits, *given, processes=processes)
    with pytest.raises(ConfigError):
        check(too_small, *given, processes=processes)
    check(too_small, *given, "ignore_memory=true", processes=processes)


def test_gradients_that_come_after_the_peak_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pretraining")
    config = load_train_config(["use_dummy_dataset=true", "model_variant=125m", "mixed_precision=false"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "_available_memory", lambda dims, device: (80 * GIB, "80 GiB free on cuda:0"))
        check_memory(config, resolve_shape(config.model), ALONE, Processes(0, 1, 0, 1, torch.device("cuda")))
    (line,) = caplog.messages
    assert line.endswith(f", minus {format_gib(511.6 * 2**20)} of gradients that are allocated after the peak")


def test_an_out_of_memory_error_names_where_memory_went_and_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step_or_fail(context: StepContext, batch: StepBatch, step: int) -> object:
        if step == 2:
            torch.empty(1 << 55, dtype=torch.uint8)
        return train_step(context, batch, step)

    monkeypatch.setattr(loop, "train_step", step_or_fail)
    error = refusal(tmp_path, "batch_size=4")
    dist.destroy_process_group()  # the process is alone, and exits after its error
    assert isinstance(error, OutOfMemoryError) and error.rank == 0 and "batch_size" in error.settings
    assert str(error).startswith("out of memory in step 3, at pretraining/train/loop.py:")
    parameters = sum(4 * size for size in (2 * 64 * 32, 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32), 32))
    assert f"Estimated: parameters {format_gib(parameters)}, gradients " in str(error), error
    assert status_of(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL error: ncclUnhandledCudaError\nLast error: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_the_many_errors_are_known(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
