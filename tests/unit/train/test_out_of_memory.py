"""Out-of-memory errors of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import status_of
from unit.train.whole_runs import refusal

from pretraining.data.batch import StepBatch
from pretraining.errors import OutOfMemoryError
from pretraining.text import format_gib
from pretraining.train import loop
from pretraining.train.memory_check import is_out_of_memory
from pretraining.train.step import StepContext, train_step


def too_large() -> None:
    torch.empty(1 << 55, dtype=torch.uint8)


def gpu_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


def fail_at_step_3(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    def step_or_fail(context: StepContext, batch: StepBatch, step: int) -> object:
        outcome = train_step(context, batch, step)
        if step == 2:
            fail()
        return outcome

    monkeypatch.setattr(loop, "train_step", step_or_fail)


@pytest.mark.parametrize("fail", [too_large, gpu_is_full])
def test_an_out_of_memory_error_names_where_memory_went_and_what_takes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    fail_at_step_3(monkeypatch, fail)
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


def test_snapshots_of_memory_need_a_gpu(tmp_path: Path) -> None:
    assert refusal(tmp_path, "memory_snapshot=true").settings == ("memory_snapshot",)
