"""Buckets of gradients of a replicated model, all-reduced while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from pretraining.distributed.host_sync import wait_for

BUCKET_BYTES = 25 * 2**20
"""As in DistributedDataParallel: larger buckets are complete too late, smaller buckets cost more calls."""


class GradientBuckets:
    """Float32 buffers with many gradients each, in reverse order of parameters, as backward computes them.

    A bucket is all-reduced once all of its gradients are complete. All devices send buckets in the same order, whatever
    the order of gradients. A bucket has memory from the first gradient of a step until its gradients are freed.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], replicas: dist.ProcessGroup) -> None:
        self._replicas = replicas
        self._buckets = [_Bucket()]
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        for parameter in reversed(parameters):
            if self._buckets[-1].offsets and self._buckets[-1].nbytes + parameter.nbytes > BUCKET_BYTES:
                self._buckets.append(_Bucket())
            self._buckets[-1].append(parameter)
            self._bucket_of[parameter] = self._buckets[-1]
        self._works: list[dist.Work] = []

    def view_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the view of a bucket for a parameter's gradient, without values."""
        bucket = self._bucket_of[parameter]
        if bucket.memory is None:
            bucket.memory = parameter.new_empty(bucket.nbytes // parameter.itemsize)
        begin = bucket.offsets[parameter]
        return bucket.memory[begin : begin + parameter.numel()].view_as(parameter)

    def hold(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient is in its bucket already, so that backward adds to it there."""
        memory = self._bucket_of[parameter].memory
        assert parameter.grad is not None
        return memory is not None and parameter.grad.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()

    def mark_complete(self, parameter: torch.Tensor) -> None:
        """Count a gradient as complete, and send every bucket that is next in order and complete."""
        self._bucket_of[parameter].complete += 1
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].is_complete:
            memory = self._buckets[len(self._works)].memory
            self._works.append(dist.all_reduce(memory, group=self._replicas, async_op=True))

    def wait(self) -> None:
        """Wait until all buckets are summed, and release them; the gradients keep the memory."""
        assert len(self._works) == len(self._buckets), "backward has left a parameter without a gradient"
        for work, bucket in zip(self._works, self._buckets, strict=True):
            wait_for(work)
            bucket.memory, bucket.complete = None, 0
        self._works.clear()


@dataclass
class _Bucket:
    """Offsets of gradients in elements, size in bytes, memory if allocated, number of complete gradients."""

    offsets: dict[torch.Tensor, int] = field(default_factory=dict)
    nbytes: int = 0
    memory: torch.Tensor | None = None
    complete: int = 0

    def append(self, parameter: torch.Tensor) -> None:
        self.offsets[parameter] = self.nbytes // parameter.itemsize
        self.nbytes += parameter.nbytes

    @property
    def is_complete(self) -> bool:
        return self.complete == len(self.offsets)
