"""The check that replicas have bit-equal weights.

Replicas start equal and make the same updates, so they stay equal unless a device computes wrongly or corrupts memory.
No other check finds such faults: each replica would keep training its own weights, with gradients summed over
different models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pretraining.config.strategies import DimSizes
from pretraining.distributed.grad_norm import local_part

_CHUNK = 1 << 20
"""Words per hashing step; a check needs memory for two int64 per word."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131
"""2**64 / golden ratio, rounded to an odd number, as int64."""


class Replicas:
    """The replicas of a model's shards."""

    def __init__(self, parameters: Sequence[nn.Parameter], dims: DimSizes) -> None:
        self._parameters = parameters
        self._replicas = dims.replicas_of_shards

    def differing_ranks(self) -> dict[int, list[int]]:
        """Return each rank whose weights differ from other holders of the same shard, with the ranks of these holders.

        If more than half of the holders of a shard agree, only the others are returned; else all holders. A collective
        call, which waits for the device.
        """
        own = torch.tensor([hash_tensors(map(local_part, self._parameters))])
        everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        hashes = [int(each) for each in everyone]
        odd = {}
        for holders in self._replicas:
            value, holding = Counter(hashes[rank] for rank in holders).most_common(1)[0]
            for rank in holders:
                if hashes[rank] != value or 2 * holding <= len(holders):
                    odd[rank] = [other for other in holders if other != rank]
        return odd


@torch.no_grad()
def hash_tensors(tensors: Iterable[torch.Tensor]) -> int:
    """Return a hash of the bits of tensors, in their order; waits for the device.

    The hash is a sum of words times odd, position-dependent factors, modulo 2**64: it always detects a change of one
    word, and almost always any other change.
    """
    total: torch.Tensor | int = 0
    for tensor in tensors:
        words = tensor.contiguous().view(-1).view(_WORDS[tensor.element_size()])
        factors = (2 * torch.arange(min(len(words), _CHUNK), device=words.device) + 1) * _ODD
        for chunk in words.split(_CHUNK):
            total = total * _ODD + (chunk.to(torch.int64) * factors[: len(chunk)]).sum()
    return int(total)
