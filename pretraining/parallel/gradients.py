"""Norm and clipping of sharded gradients, without a wait for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients that exist."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], shard_group: dist.ProcessGroup) -> torch.Tensor:
    """Euclidean norm of the whole gradient, as a scalar on the device that is the same on every rank.

    One all-reduce of one number over the shard axis; replicas hold the same gradient. A NaN or an infinity anywhere
    shows in the norm.
    """
    squared = torch.nn.utils.get_total_norm(gradients).square()
    if shard_group.size() > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


@torch.no_grad()
def clip_gradients(gradients: list[torch.Tensor], norm: torch.Tensor, threshold: float) -> None:
    """Scale the gradient so that its norm is at most `threshold`; 0 leaves it alone."""
    if threshold > 0:
        scale = torch.clamp(threshold / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, scale)
