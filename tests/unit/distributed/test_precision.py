from __future__ import annotations

from typing import Any

import pytest
import torch

from pretraining.config.training import ParallelConfig
from pretraining.distributed.parallelize import compute_dtype


@pytest.mark.parametrize(
    ("device", "units", "settings", "dtype"),
    [
        ("cpu", "", {"mixed_precision": True}, torch.bfloat16),
        ("cpu", "avx512_bf16", {"mixed_precision": False}, torch.float32),
        ("cpu", "", {}, torch.float32),
        ("cpu", "avx512_bf16", {}, torch.bfloat16),
        ("cpu", "amx_tile", {}, torch.bfloat16),
        ("cpu", "avx512_bf16", {"mp_dtype": "float16"}, torch.float32),
        ("cpu", "", {"mixed_precision": True, "mp_dtype": "float16"}, torch.float16),
        ("cuda", "cuda", {}, torch.bfloat16),
        ("cuda", "", {}, torch.float32),
        ("cuda", "cuda", {"mp_dtype": "float16"}, torch.float16),
    ],
)
def test_half_precision_needs_hardware_or_the_setting(
    device: str, units: str, settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda name=name: name == units)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: units == "cuda")
    assert compute_dtype(ParallelConfig(**settings), torch.device(device)) == dtype
