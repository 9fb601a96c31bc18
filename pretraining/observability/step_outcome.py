"""The outcome of a training step, which `observer` reports and `stability` checks."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        z_loss_sum: z-loss of the same tokens.
        valid_tokens: number in the global batch.
        grad_norm: norm of the whole gradient before clipping, equal on all ranks.
        skipped: whether the update was skipped (non-finite loss or gradient, or a spike), equal on all ranks.
        attention_span: mean length of the document, or without a document mask of the row, over this rank's tokens.
        scores: sums of this rank's tokens, by dataset (`scores.score`).
        verdict: None without spike detection.
        rescaled: whether the update was skipped to reduce the loss scale; None without a loss scale.
        custom: this rank's sum and count of each user-defined metric, [2] float64.
    """

    loss_sum: torch.Tensor
    z_loss_sum: torch.Tensor
    valid_tokens: torch.Tensor
    grad_norm: torch.Tensor
    skipped: torch.Tensor
    learning_rate: float
    attention_span: float
    scores: torch.Tensor
    verdict: SpikeVerdict | None = None
    rescaled: torch.Tensor | None = None
    custom: dict[str, torch.Tensor] = field(default_factory=dict)
