"""The norm of a gradient that is sharded over devices, and clipping by the norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients that exist."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor, without the import of its class, which takes a second."""
    return hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], shard_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the Euclidean norm of the whole gradient, a scalar on the device, equal on every rank.

    One number is all-reduced over the shard axis; replicas have equal gradients. A NaN or infinity in any gradient
    makes the norm not finite.
    """
    squared = torch.nn.utils.get_total_norm(gradients).square()
    if shard_group.size() > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


@torch.no_grad()
def clip_gradients(
    gradients: list[torch.Tensor], norm: torch.Tensor, threshold: float, loss_scale: torch.Tensor | float = 1.0
) -> None:
    """Divide gradients by `loss_scale`, and limit their norm to `threshold` (0 = no limit).

    `norm` is the norm of the gradients after the division.
    """
    factor = torch.clamp(threshold / (norm + 1e-6), max=1.0) if threshold > 0 else torch.ones_like(norm)
    if threshold > 0 or isinstance(loss_scale, torch.Tensor):
        torch._foreach_mul_(gradients, factor / loss_scale)
