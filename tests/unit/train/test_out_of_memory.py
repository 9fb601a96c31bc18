"""What a run says when memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import TINY, status_of
from unit.train.whole_runs import refusal

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import settings_of
from pretraining.config.training import TrainConfig
from pretraining.data.batch import StepBatch
from pretraining.errors import OutOfMemoryError
from pretraining.observability.out_of_memory import MemoryUse, advise, format_bytes, is_out_of_memory, memory_table
from pretraining.train import build, loop
from pretraining.train.step import StepContext, train_step

GIB = 2**30


def use_of(**changes: object) -> MemoryUse:
    values = {
        **{"device": "cuda:0 (a GPU)", "parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer_state": 8 * GIB},
        **{"peak": 76 * GIB, "allocated": 70 * GIB, "reserved": 72 * GIB, "free": GIB, "total": 80 * GIB},
        **changes,
    }
    return MemoryUse(**values)  # type: ignore[arg-type]


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
def test_a_run_without_memory_says_where_it_went_and_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    fail_at_step_3(monkeypatch, fail)
    error = refusal(tmp_path, "batch_size=4")
    dist.destroy_process_group()  # of a process that is alone with its error, and ends with it
    assert isinstance(error, OutOfMemoryError) and error.rank == 0 and "batch_size" in error.settings
    assert str(error).startswith("out of memory in step 3, at pretraining/train/loop.py:")
    parameters = sum(4 * size for size in (2 * 64 * 32, 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32), 32))
    assert re.search(rf"parameters +{re.escape(format_bytes(parameters))}\n", str(error)), error
    assert status_of(tmp_path)["status"] == "failed"


def test_while_the_run_is_put_together_it_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_optimizer", lambda *arguments: too_large())
    error = refusal(tmp_path)
    dist.destroy_process_group()
    assert isinstance(error, OutOfMemoryError) and "at pretraining/train/build.py:" in str(error)


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


def test_the_table_adds_up() -> None:
    lines = memory_table(use_of())
    assert [line.split("  ")[-1].strip() for line in lines] == [
        *("4.0 GiB", "4.0 GiB", "8.0 GiB", "60.0 GiB", "76.0 GiB", "70.0 GiB", "72.0 GiB", "1.0 GiB", "80.0 GiB")
    ]
    assert not any("allocator" in line for line in memory_table(use_of(reserved=None)))


def test_advice_names_settings_that_exist_and_what_the_allocator_holds() -> None:
    config = load_train_config([*TINY, "use_dummy_dataset=true", "batch_size=8"])
    text = "\n".join(advise(config, use_of(allocated=50 * GIB), 1, torch.device("cpu")))
    flags = set(re.findall(r"--(\w+)=", text))
    assert {"batch_size", "sharding_strategy"} <= flags <= settings_of(TrainConfig).keys()
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text
    assert "PYTORCH" not in "\n".join(advise(config, use_of(reserved=None), 1, torch.device("cpu")))


def test_snapshots_of_memory_need_a_gpu(tmp_path: Path) -> None:
    assert refusal(tmp_path, "memory_snapshot=true").settings == ("memory_snapshot",)
