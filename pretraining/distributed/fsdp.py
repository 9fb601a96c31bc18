"""Shards a model over the mesh with FSDP2, and clips its gradients: one implementation for all strategies.

Gradients are summed, not averaged, over ranks: the loss of each micro-batch is already divided by the number of valid
tokens of the *global* batch. So ranks and micro-batches with fewer valid tokens weigh less, as on one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pretraining.config.training import ShardingStrategy


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shards `model`, on any device, in place: its parameters become DTensors over a mesh (replicate, shard).

    Each block is a communication group, gathered and freed in its turn; embedding, final norm and head are another one.
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
    """Returns FSDP's policy: parameters compute in `dtype`, gradients are reduced in float32."""
    # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


class MicroBatchSync:
    """Decides what a sharded model does with gathered parameters and gradients between micro-batches of a step."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, strategy: ShardingStrategy) -> None:
        assert isinstance(model, FSDPModule)
        self._model = model
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._kept_gathered = [module for module in modules if module is model or not _reshards_blocks(mesh, strategy)]
        self._holds_whole_gradients = mesh["shard"].size() == 1

    def next_backward(self, is_last: bool) -> None:
        """Prepares the next forward and backward, perhaps the last of the step.

        Only in the last one do replicas exchange gradients, and parameters that were kept gathered are freed: until the
        update they stay the same. A rank that holds whole gradients adds them up in float32; sharded ones are reduced
        in each micro-batch, which saves the memory.
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


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Returns this rank's shards of the gradients that exist."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, which is all of it unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], shard_group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the Euclidean norm of the whole gradient, a scalar on the device, the same on every rank.

    It takes one all-reduce of one number over the shard axis; replicas hold the same gradient. A NaN or an infinity
    anywhere shows in the norm.
    """
    squared = torch.nn.utils.get_total_norm(gradients).square()
    if shard_group.size() > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


@torch.no_grad()
def clip_gradients(
    gradients: list[torch.Tensor], norm: torch.Tensor, threshold: float, loss_scale: torch.Tensor | float = 1.0
) -> None:
    """Scales gradients of the loss times `loss_scale` to those of the loss, with a norm of at most `threshold`.

    `norm` is that of the loss's own gradient; a threshold of 0 allows any.
    """
    factor = torch.clamp(threshold / (norm + 1e-6), max=1.0) if threshold > 0 else torch.ones_like(norm)
    if threshold > 0 or isinstance(loss_scale, torch.Tensor):
        torch._foreach_mul_(gradients, factor / loss_scale)
