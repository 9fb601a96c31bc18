"""Parameter groups, and updates that can be skipped.

A step with a non-finite gradient or a loss spike must not change a bit of parameters, moments and counters. An
optimizer with `skips_on_device = True` handles this itself: it reads `found_inf`, a scalar on the device, and selects
old or new values (a product with zero would keep a NaN). For other optimizers, the host waits for the device in each
step, and calls `step` only for an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pretraining.config.plugins import sharding_errors

PEAK = "initial_lr"
"""Key of a parameter group's peak learning rate, which the schedule scales; torch's schedulers use this key too."""

EMBEDDING = "embed_tokens.weight"
Groups = list[dict[str, Any]]


def parameter_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> Groups:
    """Return two parameter groups: matrices with weight decay, norms and embeddings without.

    Decay would pull a norm's gain away from 1, and shrink embedding rows of rare tokens, which seldom have a gradient.
    A tied head counts as the embedding.
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
    """Return whether a parameter with `dims` dims is a matrix of a block."""
    return dims == 2 and ".layers." in name


def update(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Update the parameters, unless `skipped` (a bool scalar on the device) is true.

    Raises:
        ConfigError: a user-defined optimizer calls what PyTorch cannot do with sharded tensors.
    """
    if skips_on_device(optimizer):
        # PyTorch's fused kernels read this attribute of gradient scalers: non-zero means "skip".
        optimizer.found_inf = skipped.to(torch.float32)  # type: ignore[attr-defined]
    elif skipped.item():
        return
    with sharding_errors(type(optimizer).__name__):
        optimizer.step()


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer skips by itself if `found_inf` is not zero."""
    return bool(getattr(optimizer, "skips_on_device", False))


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate; some optimizers keep it in a tensor, which must stay."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
