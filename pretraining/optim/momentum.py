"""Stochastic gradient descent: plain, with momentum, and with normalised momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretraining.distributed.dims import group_along
from pretraining.distributed.grad_norm import gradient_norm
from pretraining.optim.optimizer import Groups
from pretraining.optim.selecting import SelectingOptimizer, members_of

EPSILON = 1e-12
"""Added to the norm, so that updates stay small when momentum vanishes."""


class SGD(SelectingOptimizer):
    """Gradient descent as in `torch.optim.SGD`; weight decay is added to the gradient.

    momentum <- factor * momentum + gradient. The update is the momentum, or with `nesterov` gradient + factor *
    momentum.
    """

    def __init__(self, groups: Groups, lr: float, momentum: float = 0.0, nesterov: bool = False) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov)

    def update_group(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have gradients."""
        gradients = self.gradients(members, group["weight_decay"])
        momentum = group["momentum"]
        if momentum:
            moments = self.state_of(members, "momentum_buffer")
            self.accumulate(moments, momentum, gradients)
            if group["nesterov"]:
                torch._foreach_add_(gradients, moments, alpha=momentum)
            else:
                torch._foreach_copy_(gradients, moments)
        self.apply(group, members, gradients)


class NormalizedSGDM(SelectingOptimizer):
    """Momentum divided by its norm over the whole model (Cutkosky and Mehta, 2020, arXiv:2002.03305).

    Each update has the norm `lr`, unless the momentum's norm is near `EPSILON`; weight decay is decoupled.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters, unless the update is skipped; collective if they are sharded."""
        groups = [(group, members) for group in self.param_groups if (members := members_of(group))]
        moments = []
        for group, members in groups:
            moments.append(self.state_of(members, "momentum_buffer"))
            self.accumulate(moments[-1], group["momentum"], self.gradients(members), 1.0 - group["momentum"])
        if not groups:
            return
        flat, shards = [moment for each in moments for moment in each], group_along(groups[0][1][0], "shard")
        norm = torch.nn.utils.get_total_norm(flat) if shards is None else gradient_norm(flat, shards)
        inverse = (norm + EPSILON).reciprocal()
        for (group, members), each in zip(groups, moments, strict=True):
            self.apply(group, members, list(torch._foreach_mul(each, inverse)), group["weight_decay"])
