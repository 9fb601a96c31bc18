"""A model without sharding, on one device, or replicated on several devices that sum their gradients.

    masters, float32 --refresh--> copies in the compute dtype --forward, backward--> gradients of the copies
       ^                                                                                       |
       +--- update <--- gradients of all devices, summed bucket by bucket <--- added up in float32

The optimizer, checkpoints and reports see the masters; the module computes with the copies. In float32 there are no
copies: the parameters are the masters.

Devices sum gradients only in the last micro-batch of a step, while its backward runs: a bucket is sent once all of its
gradients are complete. Gradients are summed, not averaged, since each loss is already divided by the number of valid
tokens in the global batch.
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
    """A module changed in place to compute with copies of its masters.

    Attributes:
        module: the module that computes.
        parameters: float32 masters, by name in the module; without values if the module was on meta.
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
        _replace_parameters(module, computing)
        module.register_forward_pre_hook(lambda module, arguments: self.refresh())
        if self._copies or self._buckets is not None:
            # A weak proxy, because Python's garbage collector does not see hooks of parameters: it would leak a cycle.
            hook = partial(ReplicatedModel._accumulate, proxy(self))
            for index, parameter in enumerate(computing):
                parameter.register_post_accumulate_grad_hook(partial(hook, index))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the copies, if the last step freed them; every forward calls this."""
        if self._is_fresh or not self._copies:
            return
        for copy in self._copies:
            copy.untyped_storage().resize_(copy.nbytes)
        torch._foreach_copy_(self._copies, self._masters)
        self._is_fresh = True

    def masters_changed(self) -> None:
        """Make the next forward copy the masters, which something besides an update has changed."""
        self._is_fresh = False

    def next_backward(self, is_last: bool) -> None:
        """Prepare the next forward and backward; devices sum gradients only in the last one of a step."""
        self._is_last = is_last

    def finish_gradients(self) -> None:
        """Wait, after the last backward of a step, until the masters' gradients are summed over devices."""
        if self._buckets is not None:
            self._buckets.wait()

    @torch.no_grad()
    def _accumulate(self, index: int, parameter: torch.Tensor) -> None:
        master, gradient, buckets = self._masters[index], parameter.grad, self._buckets
        assert gradient is not None
        if parameter is not master:
            parameter.grad = None
            if master.grad is not None:
                master.grad += gradient
            elif buckets is None:
                master.grad = gradient.float()
            else:
                master.grad = buckets.view_of(master).copy_(gradient)
            if self._is_last:  # this step does not read the copy again: free its memory for gradients
                parameter.untyped_storage().resize_(0)
                self._is_fresh = False
        elif buckets is not None and not buckets.hold(master):  # otherwise backward has added to the bucket
            master.grad = buckets.view_of(master).copy_(gradient)
        if self._is_last and buckets is not None:
            buckets.mark_complete(master)


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device)) if parameter.is_meta else parameter


def _empty_copy(master: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype))
    copy.untyped_storage().resize_(0)
    return copy


def _replace_parameters(module: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Replace the module's parameters, in their order; tied parameters stay tied."""
    new = dict(zip(module.parameters(), parameters, strict=True))
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, new[parameter])
