"""The norm of a gradient whose pieces lie on several devices, and clipping by it."""

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
    """Return whether a tensor lies on several devices, without DTensor's class, which takes a second to import."""
    return hasattr(tensor, "placements")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, which is all of it unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], shard_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the Euclidean norm of the whole gradient, a scalar on the device, the same on every rank.

    It takes one all-reduce of one number over the shard axis; replicas hold the same gradient. A NaN or an infinity
    anywhere shows in the norm.
    """
    squared = torch.nn.utils.get_total_norm(gradients).square()
    if shard_group.size() > 1:
        dist.all_reduce(squared, group=shard_group)
    return squared.sqrt()


@torch.no_grad()
def clip_gradients(
    gradients: list[torch.Tensor], norm: torch.Tensor, threshold: float, loss_scale: torch.Tensor | float = 1.0
) -> None:
    """Scale gradients of the loss times `loss_scale` to those of the loss, with a norm of at most `threshold`.

    `norm` is that of the loss's own gradient; a threshold of 0 allows any.
    """
    factor = torch.clamp(threshold / (norm + 1e-6), max=1.0) if threshold > 0 else torch.ones_like(norm)
    if threshold > 0 or isinstance(loss_scale, torch.Tensor):
        torch._foreach_mul_(gradients, factor / loss_scale)
