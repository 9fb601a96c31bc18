"""Rotary position embedding (Su et al. 2021, RoFormer, section 3.2.2), with scaling to longer contexts.

Head dims i and i + E/2 form a pair (the "rotate-half" layout of Hugging Face weights). A token at position p rotates
pair i by p x frequency_i, so the product of a query and a key depends only on their distance.

Each forward pass computes cosines and sines once, in float32, for all blocks. A buffer would be rounded by
`model.to(torch.bfloat16)` (bfloat16 cannot represent 257), be empty after `to_empty`, and need the longest sequence.

Shapes: B batch, S sequence, H heads (of queries or keys), E head dim; P = E/2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretraining.config.variants import LlamaShape, RopeScaling

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every token's angles: float32 [B, S, 1, P], or [1, S, 1, P] if sequences share positions."""


def compute_rotation(shape: LlamaShape, positions_BS: Tensor) -> Rotation:
    """Return the rotation of tokens at integer positions [B, S], or [1, S] for all sequences."""
    frequencies_P = rotary_frequencies(shape, positions_BS.device)
    angles_BS1P = positions_BS[:, :, None, None].float() * frequencies_P
    factor = 1.0 if shape.rope_scaling is None else shape.rope_scaling.attention_factor
    return angles_BS1P.cos() * factor, angles_BS1P.sin() * factor


def rotate(x_BSHE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair of head dims by its token's angle, in float32; the result has the dtype of `x_BSHE`."""
    cos_BS1P, sin_BS1P = rotation
    first_BSHP, second_BSHP = x_BSHE.float().chunk(2, dim=-1)
    rotated = (first_BSHP * cos_BS1P - second_BSHP * sin_BS1P, second_BSHP * cos_BS1P + first_BSHP * sin_BS1P)
    return torch.cat(rotated, dim=-1).to(x_BSHE.dtype)


def rotary_frequencies(shape: LlamaShape, device: torch.device | None = None) -> Tensor:
    """Return the radians per position of each pair of head dims, float32 [P]: theta^(-2i/E), from 1 to nearly 1/theta.

    The operations are those of Hugging Face, because weights trained there expect the same roundings. The device
    computes them without a copy from the host.
    """
    exponents_P = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    frequencies_P = 1.0 / (shape.rope_theta**exponents_P)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies_P
    if scaling.rope_type == "linear":
        return frequencies_P / scaling.factor
    keep_P = _kept_by_yarn(scaling, shape, device) if scaling.rope_type == "yarn" else _kept(scaling, frequencies_P)
    return keep_P * frequencies_P + (1.0 - keep_P) * frequencies_P / scaling.factor


def _kept(scaling: RopeScaling, frequencies_P: Tensor) -> Tensor:
    """Return the share of each frequency that stays under llama3, in [0, 1]; the rest is slowed down by `factor`.

    Pairs with more than `high_freq_factor` turns in the original context keep their frequency. Pairs with less than
    `low_freq_factor` turns are slowed down. In between, both are blended linearly in the number of turns.
    """
    turns_P = scaling.original_max_position_embeddings * frequencies_P / (2 * math.pi)
    keep_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return keep_P.clamp(0.0, 1.0)


def _kept_by_yarn(scaling: RopeScaling, shape: LlamaShape, device: torch.device | None) -> Tensor:
    """Return the share of each frequency that stays under yarn (Peng et al. 2023, section 3.2), as Hugging Face does.

    The blend is linear in the number of the pair, between the pairs that make `beta_fast` and `beta_slow` turns in the
    original context.
    """

    def pair_with(turns: float) -> float:
        longest = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return shape.head_dim * math.log(longest) / (2 * math.log(shape.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.head_dim - 1)
    pairs_P = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs_P - first) / (last - first or 0.001)).clamp(0, 1)
