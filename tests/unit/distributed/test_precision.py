from __future__ import annotations

from typing import Literal

import pytest
import torch

from pretraining.config.training import ParallelConfig
from pretraining.distributed.parallelize import compute_dtype


@pytest.mark.parametrize(
    ("device", "asked", "mp_dtype", "units", "dtype"),
    [
        ("cpu", True, "bfloat16", "", torch.bfloat16),
        ("cpu", False, "bfloat16", "avx512_bf16", torch.float32),
        ("cpu", None, "bfloat16", "", torch.float32),
        ("cpu", None, "bfloat16", "avx512_bf16", torch.bfloat16),
        ("cpu", None, "bfloat16", "amx_tile", torch.bfloat16),
        ("cpu", None, "float16", "avx512_bf16", torch.float32),
        ("cpu", True, "float16", "", torch.float16),
        ("cuda", None, "bfloat16", "cuda", torch.bfloat16),
        ("cuda", None, "bfloat16", "", torch.float32),
        ("cuda", None, "float16", "cuda", torch.float16),
    ],
)
def test_half_precision_needs_hardware_or_the_setting(
    device: str,
    asked: bool | None,
    mp_dtype: Literal["bfloat16", "float16"],
    units: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: units == "cuda")
    parallel = ParallelConfig(mixed_precision=asked, mp_dtype=mp_dtype)
    assert compute_dtype(parallel, torch.device(device)) == dtype
