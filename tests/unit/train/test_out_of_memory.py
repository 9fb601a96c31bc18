"""What a run says when memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from training_runs import TINY
from unit.train.whole_runs import refusal, start, status_of

from pretraining.config.command_line import load_train_config
from pretraining.config.fields import settings_of
from pretraining.config.training import TrainConfig
from pretraining.data.batch import StepBatch
from pretraining.errors import OutOfMemoryError
from pretraining.observability.out_of_memory import MemoryUse, advise, format_bytes, is_out_of_memory, memory_table
from pretraining.train import loop, restore
from pretraining.train.step import StepContext, train_step

GIB = 2**30
CPU = torch.device("cpu")


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
    monkeypatch.setattr(restore, "build_optimizer", lambda *arguments: too_large())
    error = refusal(tmp_path)
    dist.destroy_process_group()
    assert isinstance(error, OutOfMemoryError) and "at pretraining/train/restore.py:" in str(error)


def test_other_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("shapes do not match")

    fail_at_step_3(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        start(tmp_path)
    dist.destroy_process_group()


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


SETTINGS = [*TINY, "use_dummy_dataset=true"]
NAMED = re.compile(r"--(\w+)=")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp", "hsdp"])
@pytest.mark.parametrize("batch", ["batch_size=8", "batch_size=1"])
@pytest.mark.parametrize(("world_size", "shard_size"), [(1, 1), (8, 8), (8, 4), (8, 1)])
def test_every_flag_that_is_recommended_exists(strategy: str, batch: str, world_size: int, shard_size: int) -> None:
    config = load_train_config([*SETTINGS, f"sharding_strategy={strategy}", batch], {})
    text = "\n".join(advise(config, use_of(allocated=50 * GIB), world_size, shard_size, CPU))
    flags = set(NAMED.findall(text))
    assert flags and flags <= settings_of(TrainConfig).keys()
    assert ("batch_size" in flags) == (batch != "batch_size=1")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text


def test_what_saves_most_comes_first_with_what_it_saves() -> None:
    config = load_train_config([*SETTINGS, "sharding_strategy=ddp", "batch_size=8", "global_batch_size=64"], {})
    lines = advise(config, use_of(), 8, 1, CPU)
    assert lines[0].startswith(
        "--fsdp_activation_checkpointing=true (slower by up to a third); --selective_checkpointing=2"
    )
    assert lines[1] == "--batch_size=4 in place of 8: about 30.0 GiB less"
    assert "--sharding_strategy=fsdp in place of ddp: about 14.0 GiB less" in lines
    few_activations = use_of(peak=18 * GIB)
    assert advise(config, few_activations, 8, 1, CPU)[0].startswith("--sharding_strategy=fsdp")


LARGE = ["vocab_size=128256", "batch_size=1", "seq_length=8192"]


@pytest.mark.parametrize(
    ("flags", "advice", "is_given"),
    [
        (["sharding_strategy=fsdp", "batch_size=1"], "--fsdp_activation_checkpointing=true", True),
        (
            ["sharding_strategy=fsdp", "batch_size=1", "fsdp_activation_checkpointing=true"],
            "_checkpointing=true",
            False,
        ),
        ([*LARGE, "loss_chunk_tokens=0"], "--loss_chunk_tokens=none", True),
        ([*LARGE, "loss_chunk_tokens=none"], "--loss_chunk_tokens", False),
        ([*LARGE, "loss_chunk_tokens=256"], "--loss_chunk_tokens", False),
    ],
)
def test_what_is_on_already_is_not_recommended(flags: list[str], advice: str, is_given: bool) -> None:
    text = "\n".join(advise(load_train_config([*SETTINGS, *flags], {}), use_of(), 8, 8, CPU))
    assert (advice in text) is is_given


def test_snapshots_of_memory_need_a_gpu(tmp_path: Path) -> None:
    assert refusal(tmp_path, "memory_snapshot=true").settings == ("memory_snapshot",)
