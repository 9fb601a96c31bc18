"""Lays a model out on its devices: the one place that says in which order everything is applied to it.

    float8 -> activation checkpointing -> compilation -> sharding, or masters and copies -> memory

Each step needs the ones before it: checkpointing recomputes the float8 products, the compiler sees both, and what is
sharded is the compiled block, so that gathering parameters stays outside of the graphs. Values come last, from
`model/init.py` or a checkpoint: a parameter has memory only once it is known which part of it lies here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import ParallelConfig
from pretraining.distributed.activation_checkpointing import checkpoint_activations
from pretraining.distributed.compile import compile_blocks
from pretraining.distributed.float8 import multiply_in_float8
from pretraining.distributed.fsdp import ShardedModel
from pretraining.distributed.replicated import ReplicatedModel

ParallelModel = ShardedModel | ReplicatedModel
"""What is trained of a module, and what its devices exchange in a step."""


def parallelize(
    module: nn.Module,
    blocks: nn.ModuleList,
    parallel: ParallelConfig,
    mesh: DeviceMesh,
    device: torch.device,
    tie_weights: Callable[[], None],
) -> ParallelModel:
    """Lay out a module in place, on the device; what is trained of it has no values yet if it was on meta.

    Args:
        module: on the meta device with `low_cpu_fsdp`, else on `device`.
        blocks: its decoder blocks: the units of checkpointing, compilation and sharding.
        parallel: strategy, precision and levers.
        mesh: with axes (replicate, shard).
        device: of this rank.
        tie_weights: shares parameters again once they have memory.
    """
    multiply_in_float8(blocks, parallel.float8)
    checkpoint_activations(blocks, parallel)
    if parallel.use_torch_compile:
        compile_blocks(blocks)
    dtype = compute_dtype(parallel, device)
    if mesh["shard"].size() == 1:
        return ReplicatedModel(module, dtype, device, mesh["replicate"].get_group())
    shards_parameters = STRATEGIES[parallel.sharding_strategy].shards_parameters
    return ShardedModel(module, blocks, mesh, shards_parameters, dtype, device, tie_weights)


def compute_dtype(parallel: ParallelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that a model computes in: bfloat16, float16 or float32.

    Without a setting, the device decides: a CPU without units for bfloat16 emulates it, some twenty times slower than
    float32. Always in float32 are master weights, optimizer state, gradient reduction, the statistics of norms, rotary
    angles and rotations, and the loss with what it makes of the logits.
    """
    dtype = torch.float16 if parallel.mp_dtype == "float16" else torch.bfloat16
    wanted = parallel.mixed_precision
    if wanted is None:
        wanted = has_units(device, dtype)
    return dtype if wanted else torch.float32


def has_units(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a device multiplies matrices of this dtype in hardware."""
    if dtype == torch.float16:
        return device.type == "cuda"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # The public capability string stops at AVX512; these are the only names that PyTorch has for more.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
