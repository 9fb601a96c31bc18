"""The base class of built-in optimizers: foreach operations on this rank's parts, which can skip on the device.

A skipped update runs like any other, but with gradients and updates of -0.0 and factors of 1: x * 1 and x + -0.0 keep
every bit of x. A product with zero would keep a NaN, and + 0.0 would change -0.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pretraining.distributed.grad_norm import local_gradients, local_part
from pretraining.optim.optimizer import Groups


class SelectingOptimizer(torch.optim.Optimizer):
    """An optimizer that skips its update if `found_inf`, a float scalar on the device, is not zero (None = no skip).

    Subclasses implement `update_group`. Parameters may be sharded. An update overwrites the gradients.
    """

    skips_on_device = True

    def __init__(self, groups: Groups, **settings: Any) -> None:
        super().__init__(groups, settings)
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Update all parameters, unless the update is skipped."""
        for group in self.param_groups:
            if members := members_of(group):
                self.update_group(group, members)

    def update_group(self, group: dict[str, Any], members: list[nn.Parameter]) -> None:
        """Update the parameters of a group that have gradients."""
        raise NotImplementedError

    def gradients(self, members: list[nn.Parameter], decay: float = 0.0) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients, plus `decay` times the parameters; -0.0 in a skipped update."""
        gradients = local_gradients(members)
        if decay:
            torch._foreach_add_(gradients, local_parts(members), alpha=decay)
        return self.select(gradients)

    def factor(self, value: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a scalar on the device of `like`: the value, or 1 in a skipped update."""
        given = value if isinstance(value, torch.Tensor) else torch.full((), value, device=like.device)
        return given if self.found_inf is None else torch.where(self.found_inf != 0, torch.ones_like(given), given)

    def accumulate(
        self, moments: list[torch.Tensor], decay: float, gradients: list[torch.Tensor], weight: float = 1.0
    ) -> None:
        """Multiply moments by `decay` and add `weight` times the gradients, unless the update is skipped."""
        torch._foreach_mul_(moments, self.factor(decay, moments[0]))
        torch._foreach_add_(moments, gradients, alpha=weight)

    def apply(
        self, group: dict[str, Any], members: list[nn.Parameter], updates: list[torch.Tensor], decay: float = 0.0
    ) -> None:
        """Shrink parameters by `lr` times `decay`, then subtract `lr` times the updates, which are overwritten."""
        weights = local_parts(members)
        if decay:
            torch._foreach_mul_(weights, self.factor(1.0 - group["lr"] * decay, weights[0]))
        torch._foreach_mul_(updates, -group["lr"])
        torch._foreach_add_(weights, self.select(updates))

    def state_of(self, members: list[nn.Parameter], name: str) -> list[torch.Tensor]:
        """Return this rank's parts of a state with the parameters' shapes, initially zero."""
        for parameter in members:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(parameter)
        return [local_part(self.state[parameter][name]) for parameter in members]

    def scalars_of(self, members: list[nn.Parameter], name: str, first: float) -> list[torch.Tensor]:
        """Return a state of one number per parameter."""
        for parameter in members:
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.full((), first, device=parameter.device)
        return [self.state[parameter][name] for parameter in members]

    def select(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, filled with -0.0 in a skipped update."""
        if self.found_inf is not None:
            skipped = self.found_inf != 0
            for tensor in tensors:
                tensor.masked_fill_(skipped, -0.0)
        return tensors


def members_of(group: dict[str, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group that have gradients."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def local_parts(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's parts of parameters, as views."""
    return [local_part(parameter.detach()) for parameter in parameters]
