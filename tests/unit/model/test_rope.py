"""Rotary positions: angles are exact enough, and rotation is a rotation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pretraining.config.variants import VARIANTS, RopeScaling
from pretraining.model.rope import compute_rotation, rotary_frequencies, rotate

SHAPE = VARIANTS["llama3_8b"]


def test_llama3_scaling_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    plain, stretched = rotary_frequencies(SHAPE), rotary_frequencies(replace(SHAPE, rope_scaling=scaling))
    turns = 8192 * plain / (2 * math.pi)
    fast, slow = turns > 4, turns < 1
    between = ~(fast | slow)
    assert fast.any()
    assert slow.any()
    assert between.any()
    assert torch.equal(stretched[fast], plain[fast])
    torch.testing.assert_close(stretched[slow], plain[slow] / 8)
    share = (turns[between] - 1) / 3
    torch.testing.assert_close(stretched[between], plain[between] * (share + (1 - share) / 8))
    assert (stretched.diff() < 0).all(), "the order of the pairs stays"


@pytest.mark.parametrize("position", [255, 257, 4095, 131071])
def test_bfloat16_inputs_turn_by_the_exact_angle(position: int) -> None:
    """bfloat16 cannot hold these positions: rounded, they would turn fast pairs by a random angle."""
    x = torch.randn(1, 1, 2, SHAPE.head_dim).bfloat16()
    rotation = compute_rotation(SHAPE, torch.tensor([[position]]))
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rotation).bfloat16())
    assert rotation[0].flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-6)
