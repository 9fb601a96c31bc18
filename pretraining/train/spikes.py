"""Finds steps whose loss is finite and yet wrong: far above those before.

A spike is a loss that lies more than `threshold` standard deviations above the mean of the last `window` losses. This
is the rule of OLMo 2's training code (`SkipStepOptimizer` of OLMo-core: 128 losses, 6 standard deviations), but for one
thing: only losses whose update was made enter the window. So neither a spike nor a NaN changes what is let through.

Everything happens on the device, from numbers that are the same on all ranks: the host neither waits nor decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from pretraining.observability.step_outcome import SpikeVerdict


class SpikeDetector:
    """Compares the loss of each step with those of the last steps.

    Args:
        threshold: in standard deviations.
        window: how many losses to look back on; with less than half of them, none is a spike.
        conditions: what the level of the losses depends on, JSON-able; under other conditions a new window begins.
    """

    def __init__(self, threshold: float, window: int, device: torch.device, conditions: Mapping[str, Any]) -> None:
        self._threshold = threshold
        self._fewest = window // 2
        self._conditions = dict(conditions)
        # The newest loss stands last; NaN = a place that is not taken yet.
        self._losses = torch.full((window,), torch.nan, dtype=torch.float32, device=device)

    def judge(self, loss_sum: torch.Tensor, valid_tokens: torch.Tensor) -> SpikeVerdict:
        """Judge a step; a collective call of one number.

        Args:
            loss_sum: of this rank's tokens.
            valid_tokens: of the global batch.
        """
        total = loss_sum.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        loss = total / valid_tokens.clamp(min=1)
        taken = ~self._losses.isnan()
        count = taken.sum()
        mean = self._losses.nanmean()
        squares = torch.where(taken, self._losses - mean, 0.0).square().sum()
        deviation = (squares / (count - 1).clamp(min=1)).sqrt()
        # What is compared with NaN is false: a loss that is not finite is no spike, and needs to be none.
        is_spike = (count >= self._fewest) & (loss - mean > self._threshold * deviation)
        return SpikeVerdict(is_spike, loss, mean, deviation)

    def remember(self, loss: torch.Tensor, skipped: torch.Tensor) -> None:
        """Add a step's loss to the window, unless its update was left out."""
        moved = torch.cat((self._losses[1:], loss.reshape(1)))
        self._losses = torch.where(skipped, self._losses, moved)

    def state_dict(self) -> dict[str, Any]:
        """Return the window, JSON-able; waits for the device."""
        losses = self._losses[~self._losses.isnan()].tolist()
        return {"losses": losses, "conditions": self._conditions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a window, unless it was filled under other conditions; drop its oldest losses if it is too long."""
        if state["conditions"] != self._conditions:
            return
        kept = state["losses"][-len(self._losses) :]
        if kept:
            self._losses[-len(kept) :] = torch.tensor(kept, dtype=torch.float32)
