"""The learning rate as a pure function of the step: nothing to save, nothing to drift at a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up to the peak, then half a cosine down to a fraction of it (Loshchilov and Hutter, 2017).

    Attributes:
        peak: the highest learning rate.
        warmup_steps: updates on the way up; the update after them is the first at the peak.
        total_steps: updates of the whole run; the last one uses the smallest learning rate.
        min_lr_ratio: smallest / peak.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    min_lr_ratio: float

    def at(self, step: int) -> float:
        """Learning rate of the update that follows `step` finished ones (0-based)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        decay_steps = self.total_steps - 1 - self.warmup_steps
        fraction = min(1.0, (step - self.warmup_steps) / decay_steps) if decay_steps > 0 else 0.0
        cosine = 0.5 * (1.0 + math.cos(math.pi * fraction))
        return self.peak * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)
