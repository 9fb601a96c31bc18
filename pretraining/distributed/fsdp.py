"""Shards a model over several devices with FSDP2: one implementation for all strategies that shard.

Gradients are summed, not averaged, over ranks: the loss of each micro-batch is already divided by the number of valid
tokens of the *global* batch. So ranks and micro-batches with fewer valid tokens weigh less, as on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedModel:
    """A module that FSDP2 shards in place: each block is gathered and freed in its turn, the rest is another group.

    Attributes:
        module: what computes.
        parameters: DTensors over the mesh (replicate, shard) by their names in the module, without values if it was on
            meta. Taken once: while a group is gathered, the module shows whole copies in place of them.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Iterable[nn.Module],
        mesh: DeviceMesh,
        shards_parameters: bool,
        dtype: torch.dtype,
        device: torch.device,
        tie_weights: Callable[[], None],
    ) -> None:
        # Here, since it takes a second, and one device shards nothing.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Inputs are not cast: token ids need no cast, and the rotation tables must stay in float32.
        policy = MixedPrecisionPolicy(
            None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # A replicate axis of one would add an all-reduce with nobody.
        axes = mesh if mesh.size(0) > 1 else mesh["shard"]
        for block in blocks:
            fully_shard(block, mesh=axes, mp_policy=policy, reshard_after_forward=shards_parameters)
        # The root's parameters are needed at both ends of forward and backward: never freed between them.
        root = fully_shard(module, mesh=axes, mp_policy=policy, reshard_after_forward=False)
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

    def next_backward(self, is_last: bool) -> None:
        """Prepare the next forward and backward, perhaps the last of the step.

        Only in the last one do replicas exchange gradients, and parameters that were kept gathered are freed: until the
        update they stay the same. Shards are reduced in each micro-batch, which saves the memory of whole gradients.
        """
        self._root.set_requires_all_reduce(is_last)
        self._root.set_is_last_backward(is_last)
        for group in self._kept_gathered:
            group.set_reshard_after_backward(is_last, recurse=False)

    def finish_gradients(self) -> None:
        """Do nothing: FSDP has the gradients reduced when backward returns."""


def reshard_model(model: nn.Module) -> None:
    """Free gathered parameters after a forward without a backward (evaluation, generation).

    Some strategies keep parameters gathered until a backward frees them. Without this, the module would show whole
    bfloat16 parameters in place of its shards, and the next training step would start from copies.
    """
    for module in model.modules():
        if _is_group(module):
            module.reshard()


def _is_group(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Return whether FSDP gathers and frees the parameters of a module; it then has methods of FSDP's."""
    return hasattr(module, "reshard")
