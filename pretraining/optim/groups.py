"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn


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
