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
def clip_gradients(
    gradients: list[torch.Tensor], norm: torch.Tensor, threshold: float, loss_scale: torch.Tensor | float = 1.0
) -> None:
    """Scales the gradient so that its norm is at most a threshold.

    Args:
        gradients: of the loss times `loss_scale`; afterwards, of the loss.
        norm: of the gradient of the loss.
        threshold: the largest norm; 0 = any.
        loss_scale: what the loss was multiplied by.
    """
    factor = torch.clamp(threshold / (norm + 1e-6), max=1.0) if threshold > 0 else torch.ones_like(norm)
    if threshold > 0 or isinstance(loss_scale, torch.Tensor):
        torch._foreach_mul_(gradients, factor / loss_scale)
