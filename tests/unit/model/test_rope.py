"""Rotary positions: angles are exact enough, and rotation is a rotation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pretraining.config.variants import VARIANTS, RopeScaling
from pretraining.model.rope import compute_rotation, rotary_frequencies, rotate

SHAPE = VARIANTS["llama3_8b"]


def test_frequencies_fall_from_one_to_nearly_one_over_theta() -> None:
    frequencies = rotary_frequencies(SHAPE)
    expected = torch.tensor([SHAPE.rope_theta ** (-2 * i / SHAPE.head_dim) for i in range(SHAPE.head_dim // 2)])
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


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


def test_pairs_are_the_two_halves_of_a_head() -> None:
    """Head dims i and i + E/2 turn together, as in Hugging Face weights, not i and i + 1."""
    shape = replace(SHAPE, head_dim=4)
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    turned = rotate(x, compute_rotation(shape, torch.tensor([[1]]))).flatten()
    torch.testing.assert_close(turned, torch.tensor([math.cos(1), 0.0, math.sin(1), 0.0]))


def test_position_zero_is_left_alone_and_length_is_kept() -> None:
    x = torch.randn(2, 50, 3, SHAPE.head_dim)
    turned = rotate(x, compute_rotation(SHAPE, torch.arange(50)[None]))
    assert torch.equal(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("position", [255, 257, 4095, 131071])
def test_bfloat16_inputs_turn_by_the_exact_angle(position: int) -> None:
    """bfloat16 cannot hold these positions: rounded, they would turn fast pairs by a random angle."""
    x = torch.randn(1, 1, 2, SHAPE.head_dim).bfloat16()
    rotation = compute_rotation(SHAPE, torch.tensor([[position]]))
    turned = rotate(x, rotation)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), rotation).bfloat16())
    assert rotation[0].flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-6)
