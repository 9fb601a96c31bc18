"""The model on its devices: the one place that says in which order everything that is done to it is applied.

meta device -> float8 -> activation checkpointing -> compilation -> sharding -> memory -> values
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.distributed.activation_checkpointing import checkpoint_activations
from pretraining.distributed.compile import compile_blocks
from pretraining.distributed.float8 import multiply_in_float8
from pretraining.distributed.parallelize import compute_dtype, precision_policy, shard_model
from pretraining.errors import ConfigError
from pretraining.model.attention import has_kernel_for_documents
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama


def build_model(
    shape: LlamaShape, config: TrainConfig, mesh: DeviceMesh, device: torch.device, *, initialize: bool
) -> Llama:
    """The model on its devices: described on the meta device, sharded, then given memory and values shard by shard.

    The order matters: what multiplies in float8 is also computed again so, the compiler has to see both, and sharding
    is of what was compiled.

    Args:
        shape: dimensions.
        config: strategy, precision, levers and seed.
        mesh: with axes (replicate, shard).
        device: of this rank.
        initialize: whether to draw initial weights; a restored run overwrites them.
    """
    in_shards = config.parallel.low_cpu_fsdp
    with torch.device("meta") if in_shards else device:
        model = Llama(shape, config.loss)
    if initialize and not in_shards:
        initialize_weights(model, shape, config.run.seed, device)
    multiply_in_float8(model.model.layers, config.parallel.float8)
    checkpoint_activations(model.model.layers, config.parallel)
    dtype = compute_dtype(config.parallel, device)
    if config.parallel.use_torch_compile:
        _check_shapes_are_fixed(config, shape, device, dtype)
        compile_blocks(model.blocks)
    policy = precision_policy(dtype)
    shard_model(model, model.blocks, mesh, config.parallel.sharding_strategy, policy)
    if in_shards:
        model.to_empty(device=device)
        model.tie_weights()
    if initialize and in_shards:
        initialize_weights(model, shape, config.run.seed, device)
    return model


def _check_shapes_are_fixed(config: TrainConfig, shape: LlamaShape, device: torch.device, dtype: torch.dtype) -> None:
    """A compiled block serves all steps only where attention takes all documents at once."""
    if config.data.document_mask and not has_kernel_for_documents(device, dtype, shape.head_dim):
        raise ConfigError(
            "--use_torch_compile=true compiles for fixed shapes, and with --document_mask=true attention has those of "
            f"the documents here, others in each step ({device.type}, {str(dtype).removeprefix('torch.')}, head size "
            f"{shape.head_dim}; a GPU of compute capability 8.0 takes all at once, in bfloat16 or float16, at head "
            "sizes of 8, 16, ... 256). Leave one of them out"
        )
