"""A model that each device holds whole: on one device, or on several that add up their gradients.

    masters, float32 --refresh--> copies in the compute dtype --forward, backward--> gradients of the copies
       ^                                                                                       |
       +--- update <--- gradients of all devices, summed bucket by bucket <--- added up in float32

The masters are what the optimizer, checkpoints and reports see; the module computes with the copies. A model that
computes in float32 has none: its parameters are the masters.

Several devices sum their gradients in the last micro-batch of a step only, while its backward goes on: a bucket is sent
once all of its gradients are there. They are summed, not averaged, since each loss is already divided by the number of
valid tokens of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from weakref import proxy

import torch
import torch.distributed as dist
from torch import nn

from pretraining.distributed.gradient_buckets import GradientBuckets


class ReplicatedModel:
    """The masters, copies and gradients of a module, which it lays out in place.

    Attributes:
        module: what computes.
        parameters: the masters by their names in the module, float32; without values if the module was on meta.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype, device: torch.device, replicas: dist.ProcessGroup
    ) -> None:
        self.module = module
        self.parameters = {name: _on_device(parameter, device) for name, parameter in module.named_parameters()}
        self._masters: list[torch.Tensor] = list(self.parameters.values())
        self._copies: list[torch.Tensor] = []
        if dtype != torch.float32:
            self._copies = [_empty_copy(master, dtype) for master in self._masters]
        self._is_fresh, self._is_last = False, True
        self._buckets = GradientBuckets(self._masters, replicas) if replicas.size() > 1 else None
        computing = self._copies or self._masters
        _exchange_parameters(module, computing)
        module.register_forward_pre_hook(lambda module, arguments: self.refresh())
        if self._copies or self._buckets is not None:
            # What a parameter refers to by a hook, Python's collector does not see: nothing may lead back from there.
            take = partial(ReplicatedModel._take_gradient, proxy(self))
            for index, parameter in enumerate(computing):
                parameter.register_post_accumulate_grad_hook(partial(take, index))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copies from the masters, if the last step has used up those that were; each forward does so."""
        if self._is_fresh or not self._copies:
            return
        for copy in self._copies:
            copy.untyped_storage().resize_(copy.nbytes)
        torch._foreach_copy_(self._copies, self._masters)
        self._is_fresh = True

    def next_backward(self, is_last: bool) -> None:
        """Prepare the next forward and backward, perhaps the last of the step: devices sum gradients only there."""
        self._is_last = is_last

    def finish_gradients(self) -> None:
        """Wait, after the last backward of a step, until the masters' gradients are those of all devices."""
        if self._buckets is not None:
            self._buckets.wait()

    @torch.no_grad()
    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Add what a backward has left at a parameter to the gradient of its master."""
        master, gradient, buckets = self._masters[index], parameter.grad, self._buckets
        assert gradient is not None
        if parameter is not master:
            parameter.grad = None
            if master.grad is not None:
                master.grad += gradient
            elif buckets is None:
                master.grad = gradient.float()
            else:
                master.grad = buckets.place_of(master).copy_(gradient)
            if self._is_last:  # nothing of this step reads the copy any more: gradients can have its memory
                parameter.untyped_storage().resize_(0)
                self._is_fresh = False
        elif buckets is not None and not buckets.hold(master):  # else backward has added to what is there
            master.grad = buckets.place_of(master).copy_(gradient)
        if self._is_last and buckets is not None:
            buckets.arrived(master)


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device)) if parameter.is_meta else parameter


def _empty_copy(master: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype))
    copy.untyped_storage().resize_(0)
    return copy


def _exchange_parameters(module: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Put parameters in the places of the module's own, in their order; shared ones stay shared."""
    new = dict(zip(module.parameters(), parameters, strict=True))
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, new[parameter])
