"""Frequencies of the rotary embedding, and their scaling to longer contexts (`config.variants.RopeScaling`).

Shapes: E head dim; P = E/2 pairs of head dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretraining.config.variants import LlamaShape, RopeScaling


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
