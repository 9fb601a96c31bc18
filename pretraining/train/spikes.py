"""Detector of loss spikes: steps whose loss is finite but far above the losses before.

A spike is a loss more than `threshold` standard deviations above the mean of the last `window` losses. This is the rule
of OLMo 2's training code (`SkipStepOptimizer` of OLMo-core: 128 losses, 6 standard deviations), with one difference:
only losses of applied updates enter the window. So neither a spike nor a NaN moves the threshold.

Everything is computed on the device from numbers that are the same on all ranks; the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pretraining.observability.step_outcome import SpikeVerdict


class SpikeDetector:
    """Detector that compares each loss with a window of the losses before.

    Args:
        threshold: standard deviations above the mean.
        window: losses in the window; no loss is a spike until the window is half full.
        conditions: JSON-able settings that shift the loss; a restored window with other conditions is dropped.
    """

    def __init__(self, threshold: float, window: int, device: torch.device, conditions: Mapping[str, Any]) -> None:
        self._threshold = threshold
        self._min_losses = window // 2
        self._conditions = dict(conditions)
        # The newest loss is last; NaN = an empty place.
        self._losses = torch.full((window,), torch.nan, dtype=torch.float32, device=device)

    def judge(self, loss_sum: torch.Tensor, valid_tokens: torch.Tensor) -> SpikeVerdict:
        """Return whether the loss of a step is a spike; a collective call that all-reduces one number.

        Args:
            loss_sum: summed loss of this rank's tokens.
            valid_tokens: valid tokens of the global batch.
        """
        total = loss_sum.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        loss = total / valid_tokens.clamp(min=1)
        filled = ~self._losses.isnan()
        count = filled.sum()
        mean = self._losses.nanmean()
        squares = torch.where(filled, self._losses - mean, 0.0).square().sum()
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        # A comparison with NaN is false: a non-finite loss is no spike, and its update is skipped anyway.
        is_spike = (count >= self._min_losses) & (loss - mean > self._threshold * deviation)
        return SpikeVerdict(is_spike, loss, mean, deviation)

    def remember(self, loss: torch.Tensor, skipped: torch.Tensor) -> None:
        """Add the loss of a step to the window, unless its update was skipped."""
        moved = torch.cat((self._losses[1:], loss.reshape(1)))
        self._losses = torch.where(skipped, self._losses, moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the window, JSON-able; the host waits for the device."""
        losses = self._losses[~self._losses.isnan()].tolist()
        return {"losses": losses, "conditions": self._conditions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the window, with its newest losses if it is too long; ignore a window of other conditions."""
        if state["conditions"] != self._conditions:
            return
        kept = state["losses"][-len(self._losses) :]
        if kept:
            self._losses[-len(kept) :] = torch.tensor(kept, dtype=torch.float32)
