"""Which parameters decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretraining.config.training import OptimizerConfig


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices, which decay, and norms and embeddings, which do not.

    Weight decay pulls a matrix towards zero, which regularises it; a norm's gain would be pulled away from 1, and an
    embedding row that is rarely seen would fade without a gradient to answer. An output head that is tied to the
    embedding counts as the embedding.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying, fixed = [], []
    for parameter in model.parameters():
        if parameter.dim() < 2 or id(parameter) in embeddings:
            fixed.append(parameter)
        else:
            decaying.append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": fixed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


# TODO(merge): was pretraining.optim.optimizer
# AdamW (Loshchilov and Hutter, 2019) with PyTorch's fused kernel.


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer over the parameters of `model`, sharded or not.

    Fused: one kernel for all parameters, and the only implementation that can leave parameters, moments and step
    untouched on request (`skip_update_if`) without the host waiting for the device.
    """
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def skip_update_if(optimizer: torch.optim.Optimizer, condition: torch.Tensor) -> None:
    """Make the next `optimizer.step()` a no-op where `condition` (a scalar on the device) is true."""
    # The fused kernels read this attribute, which exists for gradient scalers: a non-zero value means "skip".
    optimizer.found_inf = condition.to(torch.float32)  # type: ignore[attr-defined]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The learning rate of the next update, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def materialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Make what the first update would make (moments and step, all zero), so that a checkpoint can be read into it."""
    gradients = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradients[parameter] = parameter.grad
            parameter.grad = torch.zeros_like(parameter)
    device = next(iter(gradients)).device
    skip_update_if(optimizer, torch.ones((), device=device))
    optimizer.step()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
