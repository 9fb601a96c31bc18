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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pretraining.distributed.host_sync import wait_for

BUCKET_BYTES = 25 * 2**20


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
        self._is_fresh = False
        self._is_last = True
        self._buckets = GradientBuckets(self._masters, replicas) if replicas.size() > 1 else None
        computing = self._copies or self._masters
        _exchange_parameters(module, computing)
        if self._copies:
            module.register_forward_pre_hook(lambda module, arguments: self.refresh())
        if self._copies or self._buckets is not None:
            for parameter, master in zip(computing, self._masters, strict=True):
                parameter.register_post_accumulate_grad_hook(partial(self._take_gradient, master))

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copies from the masters, if the last step has used up those that were; each forward does so."""
        if self._is_fresh or not self._copies:
            return
        for copy in self._copies:
            copy.untyped_storage().resize_(copy.nbytes)
        torch._foreach_copy_(self._copies, self._masters)
        self._is_fresh = True

    def next_backward(self, is_last: bool) -> None:
        """Prepares the next forward and backward, perhaps the last of the step: devices sum gradients only there."""
        self._is_last = is_last

    def finish_gradients(self) -> None:
        """Waits, after the last backward of a step, until the masters' gradients are those of all devices."""
        if self._buckets is not None:
            self._buckets.wait()

    @torch.no_grad()
    def _take_gradient(self, master: torch.Tensor, parameter: torch.Tensor) -> None:
        """Adds what a backward has left at a parameter to the gradient of its master."""
        gradient, buckets = parameter.grad, self._buckets
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


class GradientBuckets:
    """Gradients side by side in memory, so that one call sums many; those that backward computes first come first.

    All devices send buckets in the same order, whatever order gradients come in. A bucket has memory from the first
    gradient of a step until its last one is let go.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas
        self._buckets = [_Bucket()]
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        for parameter in reversed(parameters):
            if self._buckets[-1].places and self._buckets[-1].nbytes + parameter.nbytes > BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].append(parameter)
            self._bucket_of[parameter] = self._buckets[-1]
        self._works: list[dist.Work] = []

    def place_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the memory of a parameter's gradient, in its shape and without values."""
        bucket = self._bucket_of[parameter]
        if bucket.memory is None:
            bucket.memory = parameter.new_empty(bucket.nbytes // parameter.itemsize)
        begin = bucket.places[parameter]
        return bucket.memory[begin : begin + parameter.numel()].view_as(parameter)

    def hold(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is in its place, so that backward adds to it there."""
        memory = self._bucket_of[parameter].memory
        assert parameter.grad is not None
        return memory is not None and parameter.grad.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Says that a gradient is complete; sends the buckets that are, from the first that was not sent."""
        self._bucket_of[parameter].arrived += 1
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].is_complete:
            memory = self._buckets[len(self._works)].memory
            self._works.append(dist.all_reduce(memory, group=self._replicas, async_op=True))

    def wait(self) -> None:
        """Waits until all buckets are summed, and forgets them: the gradients keep the memory."""
        assert len(self._works) == len(self._buckets), "backward has left a parameter without a gradient"
        for work, bucket in zip(self._works, self._buckets, strict=True):
            wait_for(work)
            bucket.memory, bucket.arrived = None, 0
        self._works.clear()


@dataclass
class _Bucket:
    """Where each gradient begins, in elements; bytes of all; memory while there is any; how many are complete."""

    places: dict[torch.Tensor, int] = field(default_factory=dict)
    nbytes: int = 0
    memory: torch.Tensor | None = None
    arrived: int = 0

    def append(self, parameter: torch.Tensor) -> None:
        self.places[parameter] = self.nbytes // parameter.itemsize
        self.nbytes += parameter.nbytes

    @property
    def is_complete(self) -> bool:
        return self.arrived == len(self.places)


def _on_device(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device)) if parameter.is_meta else parameter


def _empty_copy(master: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(master, dtype=dtype))
    copy.untyped_storage().resize_(0)
    return copy


def _exchange_parameters(module: nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Puts parameters in the places of the module's own, in their order; shared ones stay shared."""
    new = dict(zip(module.parameters(), parameters, strict=True))
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, new[parameter])
