"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2), with the stretching rule of Llama 3.1.

Head dims i and i + E/2 form a pair (the "rotate-half" layout of Hugging Face weights), which a token at position p
turns by p x frequency_i. After that, a query and a key meet with an angle that depends only on how far apart they are.

Cosines and sines are computed once a forward pass, from positions, in float32, and handed to every block. As a buffer
they could be rounded by `model.to(torch.bfloat16)` (bfloat16 cannot even count to 257), would be empty after
`to_empty`, and would need the size of the longest sequence.

Shapes: B batch, S sequence, H heads (of queries or keys), E head dim; P = E/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretraining.config.variants import LlamaShape, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles: float32 [B, S, 1, P], or [1, S, 1, P] where sequences share positions."""


def compute_rotation(shape: LlamaShape, positions_BS: Tensor) -> Rotation:
    """Return the angles of tokens at integer positions [B, S], or [1, S] for all sequences, as cosine and sine."""
    frequencies_P = rotary_frequencies(shape, positions_BS.device)
    angles_BS1P = positions_BS[:, :, None, None].float() * frequencies_P
    return angles_BS1P.cos(), angles_BS1P.sin()


def rotary_frequencies(shape: LlamaShape, device: torch.device | None = None) -> Tensor:
    """Return radians a position of each pair of head dims, float32 [P]: theta^(-2i/E), from 1 to nearly 1/theta.

    Computed on the device, without a copy from the host, by the same operations as Hugging Face: weights that were
    trained there expect the same roundings.
    """
    exponents_P = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies_P = 1.0 / (shape.rope_theta**exponents_P)
    return frequencies_P if shape.rope_scaling is None else _stretch(frequencies_P, shape.rope_scaling)


def rotate(x_BSHE: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of head dims by its token's angle, in float32; the result has the dtype of `x_BSHE`."""
    cos_BS1P, sin_BS1P = rotation
    first_BSHP, second_BSHP = x_BSHE.float().chunk(2, dim=-1)
    rotated = (first_BSHP * cos_BS1P - second_BSHP * sin_BS1P, second_BSHP * cos_BS1P + first_BSHP * sin_BS1P)
    return torch.cat(rotated, dim=-1).to(x_BSHE.dtype)


def _stretch(frequencies_P: Tensor, scaling: RopeScaling) -> Tensor:
    """Make frequencies fit a context `factor` times as long (Llama 3.1; "llama3" in Hugging Face configurations).

    A pair that turns more than `high_freq_factor` times within the original context tells near tokens apart, and stays.
    One that turns less than `low_freq_factor` times tells regions apart, and is slowed down by `factor`. In between,
    the two are blended, linearly in the number of turns.
    """
    turns_P = scaling.original_max_position_embeddings * frequencies_P / (2 * math.pi)
    keep_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_P = keep_P.clamp(0.0, 1.0)
    return keep_P * frequencies_P + (1.0 - keep_P) * frequencies_P / scaling.factor
