"""Gradients of a model that several devices hold whole, summed over them in a few calls while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pretraining.distributed.host_sync import wait_for

BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: larger ones are complete too late, smaller ones cost more calls."""


class GradientBuckets:
    """Gradients side by side in float32, so that one call sums many; those that backward computes first come first.

    A bucket is sent once all of its gradients are there, and all devices send buckets in the same order, whatever order
    gradients come in. It has memory from the first gradient of a step until its last one is let go.
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
        """Return the memory of a parameter's gradient, in its shape and without values."""
        bucket = self._bucket_of[parameter]
        if bucket.memory is None:
            bucket.memory = parameter.new_empty(bucket.nbytes // parameter.itemsize)
        begin = bucket.places[parameter]
        return bucket.memory[begin : begin + parameter.numel()].view_as(parameter)

    def hold(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient is in its place, so that backward adds to it there."""
        memory = self._bucket_of[parameter].memory
        assert parameter.grad is not None
        return memory is not None and parameter.grad.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def arrived(self, parameter: torch.Tensor) -> None:
        """Say that a gradient is complete; sends the buckets that are, from the first that was not sent."""
        self._bucket_of[parameter].arrived += 1
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].is_complete:
            memory = self._buckets[len(self._works)].memory
            self._works.append(dist.all_reduce(memory, group=self._replicas, async_op=True))

    def wait(self) -> None:
        """Wait until all buckets are summed, and forget them: the gradients keep the memory."""
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
