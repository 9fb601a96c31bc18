"""Shards a model over the mesh with FSDP2: one implementation for all strategies.

Gradients are summed, not averaged, over ranks: the loss of each micro-batch is already divided by the number of valid
tokens of the *global* batch, so that ranks and micro-batches with fewer valid tokens weigh less, as they would on one
process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pretraining.config.training import ShardingStrategy


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shards `model` in place: one communication group a block, and one for what is left (embedding, final norm, head).

    Args:
        model: on any device, also meta; its parameters become DTensors.
        blocks: the sub-modules that are gathered and freed one after the other.
        mesh: with axes (replicate, shard).
        strategy: ddp, zero2, fsdp, hsdp or hsdp_zero2.
        policy: in which precision parameters compute.
    """
    # A replicate axis of one would add an all-reduce with nobody.
    axes = mesh if mesh.size(0) > 1 else mesh["shard"]
    reshard = _reshards_blocks(mesh, strategy)
    for block in blocks:
        fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=reshard)
    # The root's parameters are needed at both ends of forward and backward: never freed between them.
    fully_shard(model, mesh=axes, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mesh.size() > 1:  # else it would divide by 1, a pass over all gradients
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and a scale of 1 needs none


def precision_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """FSDP's policy: parameters are cast to `dtype` where they compute, gradients are reduced in float32."""
    # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


class MicroBatchSync:
    """What happens to gathered parameters and to gradients between the micro-batches of a step.

    Args:
        model: sharded.
        mesh: that it is sharded over.
        strategy: ddp, zero2, fsdp, hsdp or hsdp_zero2.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, strategy: ShardingStrategy) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._kept_gathered = [module for module in modules if module is model or not _reshards_blocks(mesh, strategy)]
        self._holds_whole_gradients = mesh["shard"].size() == 1

    def next_backward(self, is_last: bool) -> None:
        """Prepares the next forward and backward; `is_last`: of the step.

        Only the last one lets replicas exchange gradients, and lets go of parameters that were kept gathered after the
        forward: until the update they stay the same. A rank that holds whole gradients adds them up as they are (in
        float32); where they are sharded, each micro-batch's are reduced at once, which is what saves the memory.
        """
        if self._holds_whole_gradients:
            self._model.set_requires_gradient_sync(is_last)
        else:
            self._model.set_requires_all_reduce(is_last)
        self._model.set_is_last_backward(is_last)
        for module in self._kept_gathered:
            module.set_reshard_after_backward(is_last, recurse=False)


def _reshards_blocks(mesh: DeviceMesh, strategy: ShardingStrategy) -> bool:
    # One rank that holds everything frees nothing by letting go of what it gathered: it would only copy it again.
    return strategy in ("fsdp", "hsdp") and mesh["shard"].size() > 1


def reshard_model(model: nn.Module) -> None:
    """Frees gathered parameters after a forward without a backward (evaluation, generation).

    Some strategies keep parameters gathered until a backward frees them. Without this, the module would show whole
    bfloat16 parameters in place of its shards, and the next training step would start from copies.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
