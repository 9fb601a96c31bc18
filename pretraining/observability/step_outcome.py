"""What a training step leaves behind for those that watch the run: `observer` reports it, `stability` judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class SpikeVerdict:
    """A step's loss beside those before it; scalars on the device, the same on all ranks.

    Attributes:
        loss: mean over the valid tokens of the global batch.
        mean, deviation: of the losses before.
    """

    is_spike: torch.Tensor
    loss: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor


@dataclass(frozen=True)
class StepOutcome:
    """What a training step leaves behind; tensors are scalars on the device, unless they say otherwise.

    Attributes:
        loss_sum: of this rank's valid tokens, without z-loss.
        z_loss_sum: of the same tokens; 0 where z-loss is off.
        valid_tokens: of the global batch.
        grad_norm: of the whole gradient before clipping, the same on all ranks.
        skipped: whether the update was left out (loss or gradient not finite, or a spike), the same on all ranks.
        attention_span: mean number of tokens of the document that a token of this rank is in; without a document mask,
            of the row.
        scores: of this rank's tokens, by dataset (`scores.score`).
        verdict: None where spikes are not looked for.
        rescaled: whether the update was left out to go on with a smaller loss scale; None without one.
        custom: of this rank, sum and count of each of the user's metrics, [2] float64.
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
