"""In which precision a model computes; master weights, optimizer state and gradient reduction are always float32.

Float32 in any precision are, besides: the statistics of norms, rotary angles and rotations, the loss and what it makes
of the logits.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from pretraining.config.parallel import ParallelConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def compute_dtype(parallel: ParallelConfig, device: torch.device) -> torch.dtype:
    """bfloat16, float16 or float32; where nothing is said, the device decides by what it has units for.

    A CPU without them emulates bfloat16 and is some twenty times slower than in float32.
    """
    dtype = _DTYPES[parallel.mp_dtype]
    wanted = parallel.mixed_precision
    if wanted is None:
        wanted = _has_units(device, dtype)
    return dtype if wanted else torch.float32


def precision_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """FSDP's policy: parameters in `dtype` while they compute, gradients reduced in float32."""
    # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _has_units(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype == torch.float16:
        return device.type == "cuda"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # The public capability string stops at AVX512; these are the only names that PyTorch has for more.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
