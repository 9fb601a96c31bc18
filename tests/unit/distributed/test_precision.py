from __future__ import annotations

import pytest
import torch

from pretraining.config.training import ParallelConfig
from pretraining.distributed.fsdp import precision_policy
from pretraining.distributed.parallelize import compute_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "avx512", "amx", "dtype"),
    [
        (True, False, False, torch.bfloat16),
        (False, True, True, torch.float32),
        (None, False, False, torch.float32),
        (None, True, False, torch.bfloat16),
        (None, False, True, torch.bfloat16),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_has_units_for_it_or_is_told_to(
    asked: bool | None, avx512: bool, amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert compute_dtype(ParallelConfig(mixed_precision=asked), CPU) == dtype


@pytest.mark.parametrize("has_units", [True, False])
def test_a_gpu_computes_in_bfloat16_where_it_has_units_for_it(has_units: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units)
    dtype = compute_dtype(ParallelConfig(), torch.device("cuda"))
    assert dtype == (torch.bfloat16 if has_units else torch.float32)


def test_float16_is_for_gpus_and_for_cpus_that_are_told_to() -> None:
    for device, asked, dtype in (
        ("cuda", None, torch.float16),
        ("cpu", None, torch.float32),
        ("cpu", True, torch.float16),
    ):
        parallel = ParallelConfig(mixed_precision=asked, mp_dtype="float16")
        assert compute_dtype(parallel, torch.device(device)) == dtype


def test_gradients_are_reduced_in_float32_in_either_precision() -> None:
    assert precision_policy(torch.bfloat16).param_dtype == torch.bfloat16
    assert precision_policy(torch.float32).param_dtype is None
    assert all(precision_policy(dtype).reduce_dtype == torch.float32 for dtype in (torch.bfloat16, torch.float32))
