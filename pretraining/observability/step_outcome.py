"""The outcome of a training step, which `collector` sums and `stability` checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SpikeVerdict:
    """A comparison of a step's loss with earlier losses; scalars on the device, equal on all ranks.

    Attributes:
        loss: mean over the valid tokens of the global batch.
        mean, deviation: mean and deviation of earlier losses.
    """

    is_spike: torch.Tensor
    loss: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a training step; tensors are scalars on the device unless stated otherwise.

    Attributes:
        loss_sum: loss of this rank's valid tokens, without z-loss.
        valid_tokens: number in the global batch.
        grad_norm: norm of the whole gradient before clipping, equal on all ranks.
        skipped: whether the update was skipped (non-finite loss or gradient, or a spike), equal on all ranks.
        verdict: None without spike detection.
        rescaled: whether the update was skipped to reduce the loss scale; None without a loss scale.
    """

    loss_sum: torch.Tensor
    valid_tokens: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    learning_rate: float
    verdict: SpikeVerdict | None = None
    rescaled: torch.Tensor | None = None
