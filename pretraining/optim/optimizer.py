"""Parameter groups, and how an update is made or skipped.

A step whose gradient is not finite, or whose loss is a spike, must leave parameters, moments and counters as they are,
to the bit. An optimizer with `skips_on_device = True` does so itself: it reads `found_inf`, a scalar on the device, and
selects (NaN times zero is NaN). Any other is called only where the host knows that there is an update to make, which
costs a wait for the device at each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

PEAK = "initial_lr"
"""Key of a parameter group's peak learning rate, which the schedule scales (the name that torch's schedulers use)."""

EMBEDDING = "embed_tokens.weight"
Groups = list[dict[str, Any]]


def parameter_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> Groups:
    """Return two groups for an optimizer: matrices, which decay, and norms and embeddings, which do not.

    Decay regularises a matrix; it would pull a norm's gain away from 1, and fade embedding rows that are rarely seen
    without a gradient to answer. A head that is tied to the embedding counts as the embedding.
    """
    decaying, fixed = [], []
    for name, parameter in parameters.items():
        if parameter.dim() < 2 or name.endswith(EMBEDDING):
            fixed.append(parameter)
        else:
            decaying.append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": fixed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def is_hidden_matrix(name: str, dims: int) -> bool:
    """Return whether a parameter of so many dims is a matrix of a block."""
    return dims == 2 and ".layers." in name


def update(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Make an update, unless `skipped` (a bool scalar on the device) is true."""
    if skips_on_device(optimizer):
        # The fused kernels read this attribute, which exists for gradient scalers: a non-zero value means "skip".
        optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer leaves everything untouched by itself where `found_inf` is not zero."""
    return bool(getattr(optimizer, "skips_on_device", False))


@torch.no_grad()
def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make what the first update would make (moments and counters), so that a checkpoint can be read into it.

    Gradient and learning rate are zero, so parameters keep their bits.
    """
    gradients = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    if skips_on_device(optimizer):
        update(optimizer, torch.ones((), dtype=torch.bool, device=next(iter(gradients)).device))
    else:
        optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
