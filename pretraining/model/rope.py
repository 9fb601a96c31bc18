"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2), with scaling to longer contexts.

Head dims i and i + E/2 form a pair (the "rotate-half" layout of Hugging Face weights). A token at position p rotates
pair i by p x frequency_i, so the product of a query and a key depends only on their distance.

Each forward pass computes cosines and sines once, in float32, for all blocks. A buffer would be rounded by
`model.to(torch.bfloat16)` (bfloat16 cannot represent 257), be empty after `to_empty`, and need the longest sequence.

Shapes: B batch, S sequence, H heads (of queries or keys), E head dim; P = E/2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretraining.config.variants import LlamaShape
from pretraining.model.frequencies import rotary_frequencies

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles: float32 [B, S, 1, P], or [1, S, 1, P] if sequences share positions."""


def compute_rotation(shape: LlamaShape, positions_BS: Tensor) -> Rotation:
    """Return the rotation of tokens at integer positions [B, S], or [1, S] for all sequences."""
    frequencies_P = rotary_frequencies(shape, positions_BS.device)
    angles_BS1P = positions_BS[:, :, None, None].float() * frequencies_P
    scaling = shape.rope_scaling
    if scaling is None or scaling.attention_factor == 1:
        return angles_BS1P.cos(), angles_BS1P.sin()
    return angles_BS1P.cos() * scaling.attention_factor, angles_BS1P.sin() * scaling.attention_factor


def rotate(x_BSHE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of head dims by its token's angle, in float32; the result has the dtype of `x_BSHE`."""
    cos_BS1P, sin_BS1P = rotation
    first_BSHP, second_BSHP = x_BSHE.float().chunk(2, dim=-1)
    rotated = (first_BSHP * cos_BS1P - second_BSHP * sin_BS1P, second_BSHP * cos_BS1P + first_BSHP * sin_BS1P)
    return torch.cat(rotated, dim=-1).to(x_BSHE.dtype)
