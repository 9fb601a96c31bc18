"""In which precision a model computes; master weights, optimizer state and gradient reduction are always float32."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def compute_dtype(mixed_precision: bool | None, device: torch.device) -> torch.dtype:
    """bfloat16 or float32; None decides by what the device has units for.

    A CPU without them emulates bfloat16 and is some twenty times slower than in float32.
    """
    if mixed_precision is None:
        mixed_precision = _has_bfloat16_units(device)
    return torch.bfloat16 if mixed_precision else torch.float32


def precision_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """FSDP's policy: parameters in `dtype` while they compute, gradients reduced in float32."""
    # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _has_bfloat16_units(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # The public capability string stops at AVX512; these are the only names that PyTorch has for more.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
