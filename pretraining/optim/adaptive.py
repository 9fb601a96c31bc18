"""Optimizers that divide by a running root mean square of gradients: AdamW, Adam, NAdam, RMSprop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretraining.optim.optimizer import Groups
from pretraining.optim.selecting import SelectingOptimizer

MOMENTUM_DECAY = 4e-3
"""Rate at which NAdam's momentum factor approaches its limit (Dozat, 2016)."""


class FusedAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, 2019) with PyTorch's fused kernel, which skips on the device."""

    skips_on_device = True

    def __init__(self, groups: Groups, **settings: Any) -> None:
        super().__init__(groups, **settings, fused=True)


class FusedAdam(torch.optim.Adam):
    """Adam (Kingma and Ba, 2015) with PyTorch's fused kernel; weight decay is added to the gradient."""

    skips_on_device = True

    def __init__(self, groups: Groups, **settings: Any) -> None:
        super().__init__(groups, **settings, fused=True)


class NAdamW(SelectingOptimizer):
    """Adam with Nesterov momentum as in `torch.optim.NAdam` (Dozat, 2016), with decoupled weight decay.

    All parameters have the same number of updates, so factors that depend on it are computed once per group.
    """

    def update_group(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have gradients."""
        gradients = self.gradients(members)
        (beta1, beta2), first = group["betas"], gradients[0]
        means, squares = self.state_of(members, "exp_avg"), self.state_of(members, "exp_avg_sq")
        steps, products = self.scalars_of(members, "step", 0.0), self.scalars_of(members, "mu_product", 1.0)
        # A skipped update computes with the next count too, but keeps nothing.
        step = steps[0] + 1.0
        torch._foreach_add_(steps, [self.factor(2.0, first) - 1.0] * len(steps))
        now = beta1 * (1.0 - 0.5 * 0.96 ** (step * MOMENTUM_DECAY))
        following = beta1 * (1.0 - 0.5 * 0.96 ** ((step + 1.0) * MOMENTUM_DECAY))
        product = products[0] * now
        torch._foreach_mul_(products, self.factor(now, first))

        self.accumulate(means, beta1, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, self.factor(beta2, first))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1.0 - beta2**step).sqrt())
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_mul(means, following / (1.0 - product * following)))
        torch._foreach_mul_(gradients, (1.0 - now) / (1.0 - product))
        torch._foreach_add_(updates, gradients)
        torch._foreach_div_(updates, roots)
        self.apply(group, members, updates, group["weight_decay"])


class RMSprop(SelectingOptimizer):
    """RMSprop as in `torch.optim.RMSprop` (Tieleman and Hinton, 2012); weight decay is added to the gradient.

    Momentum accumulates gradients divided by their root mean square.
    """

    def update_group(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have gradients."""
        gradients = self.gradients(members, group["weight_decay"])
        alpha, momentum = group["alpha"], group["momentum"]
        squares = self.state_of(members, "square_avg")
        torch._foreach_mul_(squares, self.factor(alpha, squares[0]))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - alpha)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(gradients, roots)
        if momentum:
            moments = self.state_of(members, "momentum_buffer")
            self.accumulate(moments, momentum, self.select(gradients))
            torch._foreach_copy_(gradients, moments)
        self.apply(group, members, gradients)
