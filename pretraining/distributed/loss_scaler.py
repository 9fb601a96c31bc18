"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).

Gradients below 6e-8 vanish in float16. So the loss is multiplied by a scale before backward, and gradients are divided
by the scale afterwards, in float32. If a scaled gradient overflows, the update is skipped and the scale is halved;
after 2000 steps without overflow the scale is doubled. The constants are those of `torch.amp.GradScaler`. Everything
stays on the device, and depends on a norm that is equal on all ranks. bfloat16 has the range of float32 and needs no
scale.
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
"""With a larger scale, the squares of scaled gradients would exceed float32."""


class LossScaler:
    """State of the dynamic loss scale; `scale` multiplies the next step's losses, a float32 scalar on the device."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self._steps = torch.zeros((), dtype=torch.int64, device=device)  # since the last change

    def update(self, overflowed: torch.Tensor) -> torch.Tensor:
        """Adjust the scale after a step; return whether it was halved, a bool scalar on the device.

        At the smallest scale, 1, a gradient that is not finite is no overflow of float16, and the scale stays.

        Args:
            overflowed: whether a scaled gradient was not finite, equal on all ranks.
        """
        backs_off = overflowed & (self.scale > SMALLEST_SCALE)
        steps = torch.where(overflowed, 0, self._steps + 1)
        grows = steps >= GROWTH_INTERVAL
        factor = torch.where(backs_off, BACKOFF, torch.where(grows, GROWTH, 1.0))
        self.scale = (self.scale * factor).clamp(SMALLEST_SCALE, LARGEST_SCALE)
        self._steps = torch.where(grows, 0, steps)
        return backs_off

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; waits for the device."""
        return {"scale": self.scale.item(), "steps": int(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self._steps = torch.full_like(self._steps, state["steps"])
