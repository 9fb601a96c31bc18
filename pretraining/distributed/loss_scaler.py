"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).

Gradients below 6e-8 vanish in float16, so the loss is multiplied by a scale before backward, and gradients are divided
by it afterwards, in float32. If a scaled gradient overflows, the update is left out and the scale is halved; after 2000
steps without that it is doubled. The numbers are those of `torch.amp.GradScaler`. Everything happens on the device,
from a norm that is the same on all ranks. bfloat16 has the range of float32 and needs no scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_INTERVAL = 2000
SMALLEST_SCALE = 1.0
LARGEST_SCALE = 2.0**40
"""Beyond it, the squares of scaled gradients would leave float32."""


class LossScaler:
    """Finds `scale`, by which the next step's losses are to be multiplied: a float32 scalar on the device."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)  # since the scale has changed

    def update(self, overflowed: torch.Tensor) -> torch.Tensor:
        """Learn from a step; returns whether the scale went down, a bool scalar on the device.

        The scale stays above 1: a gradient that is not finite there is so by itself. `overflowed` says whether a scaled
        gradient was not finite, the same on all ranks.
        """
        backs_off = overflowed & (self.scale > SMALLEST_SCALE)
        steps = torch.where(overflowed, 0, self._steps + 1)
        grows = steps >= GROWTH_INTERVAL
        factor = torch.where(backs_off, BACKOFF, torch.where(grows, GROWTH, 1.0))
        self.scale = (self.scale * factor).clamp(SMALLEST_SCALE, LARGEST_SCALE)
        self._steps = torch.where(grows, 0, steps)
        return backs_off

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; waits for the device."""
        return {"scale": self.scale.item(), "steps": int(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint has kept."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self._steps = torch.full_like(self._steps, state["steps"])
