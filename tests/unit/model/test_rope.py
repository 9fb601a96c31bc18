"""Rotary positions: angles are exact enough, and rotation is a rotation."""

from __future__ import annotations

import math

import pytest
import torch

from pretraining.config.variants import VARIANTS
from pretraining.model.rope import compute_rotation, rotate

SHAPE = VARIANTS["llama3_8b"]


@pytest.mark.parametrize("position", [255, 257, 4095, 131071])
def test_bfloat16_inputs_turn_by_the_exact_angle(position: int) -> None:
    """Rounded to bfloat16, these positions would rotate fast pairs by a random angle."""
    x = torch.randn(1, 1, 2, SHAPE.head_dim).bfloat16()
    rotation = compute_rotation(SHAPE, torch.tensor([[position]]))
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rotation).bfloat16())
    assert rotation[0].flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-6)
