"""Parallelization of a model, and the order of its steps.

    float8 -> activation checkpointing -> compilation -> sharding, or masters and copies -> memory

The order matters: checkpointing recomputes the float8 products, the compiler sees both, and sharding wraps compiled
blocks, so that gathering stays outside of the graphs. Parameters get memory after sharding, and values last, from
`model/init.py` or a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pretraining.config.strategies import STRATEGIES
from pretraining.config.training import ParallelConfig
from pretraining.distributed.activation_checkpointing import checkpoint_activations
from pretraining.distributed.compile import compile_blocks
from pretraining.distributed.dims import Dims
from pretraining.distributed.float8 import multiply_in_float8
from pretraining.distributed.fsdp import ShardedModel
from pretraining.distributed.unsharded import ReplicatedModel

ParallelModel = ShardedModel | ReplicatedModel
"""A parallelized module with its parameters and the communication of a step."""


def parallelize(
    module: nn.Module,
    blocks: nn.ModuleList,
    parallel: ParallelConfig,
    dims: Dims,
    device: torch.device,
    tie_weights: Callable[[], None],
) -> ParallelModel:
    """Parallelize a module in place; parameters have memory but no values afterwards if the module was on meta.

    Args:
        module: the model, on the meta device with `low_cpu_fsdp`, else on `device`.
        blocks: its decoder blocks, the units of checkpointing, compilation and sharding.
        parallel: settings.
        dims: dimensions of the job.
        device: this rank's device.
        tie_weights: function that ties shared parameters again after memory is allocated.
    """
    multiply_in_float8(blocks, parallel.float8)
    checkpoint_activations(blocks, parallel)
    if parallel.use_torch_compile:
        compile_blocks(blocks)
    dtype = compute_dtype(parallel, device)
    if dims.shard == 1:
        return ReplicatedModel(module, dtype, device, dims.group("replicate"))
    shards_parameters = STRATEGIES[parallel.sharding_strategy].shards_parameters
    return ShardedModel(module, blocks, dims, shards_parameters, dtype, device, tie_weights)


def compute_dtype(parallel: ParallelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that a model computes in: bfloat16, float16 or float32.

    By default the device decides: a CPU without bfloat16 hardware emulates it, about twenty times slower than float32.
    Master weights, optimizer state, gradient reduction, statistics of norms, rotary embeddings and the loss are always
    in float32.
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
    # PyTorch has no public names for these two capabilities.
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
