"""Sharding of a model over several devices with FSDP2, for all strategies that shard.

Gradients are summed over ranks, not averaged: the loss of each micro-batch is already divided by the number of valid
tokens in the *global* batch. So ranks and micro-batches with fewer valid tokens weigh less, as on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from pretraining.distributed.dims import Dims

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedModel:
    """A module sharded in place by FSDP2, with each block as one group, and all other parameters as the root group.

    Attributes:
        module: the sharded module.
        parameters: DTensors over the mesh, by name in the module, without values if the module was on meta.
            Stored here, because the module shows whole copies while a group is gathered.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        dims: Dims,
        shards_parameters: bool,
        dtype: torch.dtype,
        device: torch.device,
        tie_weights: Callable[[], None],
    ) -> None:
        # Imported here: it takes a second, and a run on one device does not need it.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
        policy = MixedPrecisionPolicy(
            None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # A replicate axis of size 1 would add an empty all-reduce.
        mesh = dims.mesh if dims.replicate > 1 else dims.mesh["shard"]
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=shards_parameters)
        # The root's parameters are needed at the beginning and the end of forward and backward, so they stay gathered.
        root = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        groups = [each for each in module.modules() if _is_group(each)]
        for group in groups:
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, and a scale of 1 needs none
        if any(parameter.is_meta for parameter in module.parameters()):
            module.to_empty(device=device)
            tie_weights()
        self.module = module
        self.parameters = dict(module.named_parameters())
        self._root = root
        self._kept_gathered = [root] if shards_parameters else groups

    def masters_changed(self) -> None:
        """Do nothing: each gathering copies the masters."""

    def next_backward(self, is_last: bool) -> None:
        """Prepare the next forward and backward; `is_last` is the last one of the step.

        Only the last one all-reduces gradients over replicas, and frees parameters that stay gathered between
        micro-batches. Every micro-batch reduces gradients to shards, which saves the memory of whole gradients.
        """
        self._root.set_requires_all_reduce(is_last)
        self._root.set_is_last_backward(is_last)
        for group in self._kept_gathered:
            group.set_reshard_after_backward(is_last, recurse=False)

    def finish_gradients(self) -> None:
        """Do nothing: FSDP has reduced the gradients when backward returns."""


def reshard_model(model: nn.Module) -> None:
    """Free gathered parameters after a forward without backward (evaluation, generation).

    Some strategies keep parameters gathered until backward frees them. Without this call, the next training step would
    start from the gathered bfloat16 copies instead of the shards.
    """
    for module in model.modules():
        if _is_group(module):
            module.reshard()


def _is_group(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether a module is an FSDP group, which has FSDP's methods."""
    return hasattr(module, "reshard")
