"""Causal self-attention with grouped queries (Ainslie et al. 2023, GQA).

H query heads share K key/value heads; K = H is plain multi-head attention. `kernels.py` computes it.

Shapes: B batch, S sequence, D hidden, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from torch import Tensor, nn

from pretraining.config.variants import LlamaShape
from pretraining.model.kernels import Documents, causal_attention, document_attention
from pretraining.model.rope import Rotation, rotate


class MoreTokens(Protocol):
    """Keys and values besides those of the given tokens: of earlier ones, or of other ranks (shared_rows.py)."""

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, scale: float | None) -> Tensor:
        """Add tokens, and return their attention: [B, S, H, E]."""


Reach: TypeAlias = Documents | MoreTokens | None
"""The earlier tokens that a token attends to: in its document, in its row and elsewhere, or (None) in its row."""


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head: [B, S, H·E] -> [B, S, H·E]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each head, with one weight for all heads."""
        return super().forward(x.unflatten(-1, (-1, *self.normalized_shape))).flatten(-2)


def build_norm(shape: LlamaShape, width: int) -> nn.Module:
    """Return the norm of queries or keys of a width, in front of the split into heads."""
    if shape.qk_norm == "off":
        return nn.Identity()
    kind, size = (HeadNorm, shape.head_dim) if shape.qk_norm == "head" else (nn.RMSNorm, width)
    return kind(size, shape.rms_norm_eps)


def keep(x_BSHE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate nothing, in place of `rotate`: for a block without rotary embedding."""
    return x_BSHE


class Attention(nn.Module):
    """Self-attention of one block, with the layer names of Hugging Face's Llama.

    Args:
        layer: number of the block, from 0.
    """

    def __init__(self, shape: LlamaShape, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.scale = shape.attention_multiplier
        self.rotate = rotate if shape.rotates(layer) else keep
        has_bias = shape.attention_bias != "false"
        self.q_proj = nn.Linear(shape.hidden_size, shape.query_width, bias=has_bias)
        self.k_proj = nn.Linear(shape.hidden_size, shape.key_width, bias=has_bias)
        self.v_proj = nn.Linear(shape.hidden_size, shape.key_width, bias=has_bias)
        self.o_proj = nn.Linear(shape.query_width, shape.hidden_size, bias=shape.attention_bias == "true")
        self.q_norm = build_norm(shape, shape.query_width)
        self.k_norm = build_norm(shape, shape.key_width)

    def forward(self, x_BSD: Tensor, rotation: Rotation, reach: Reach = None) -> Tensor:
        """Return the attention output [B, S, D] of normalised hidden states [B, S, D].

        `rotation` comes from `compute_rotation`, documents in `reach` from `locate_documents`.
        """
        q_BSHE = self.q_norm(self.q_proj(x_BSD)).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.k_norm(self.k_proj(x_BSD)).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHE, k_BSKE = self.rotate(q_BSHE, rotation), self.rotate(k_BSKE, rotation)
        if reach is None:
            mixed_BSHE = causal_attention(q_BSHE, k_BSKE, v_BSKE, self.scale)
        elif isinstance(reach, tuple):
            mixed_BSHE = document_attention(q_BSHE, k_BSKE, v_BSKE, reach, self.scale)
        else:
            mixed_BSHE = reach.attend(q_BSHE, k_BSKE, v_BSKE, self.scale)
        out_BSD: Tensor = self.o_proj(mixed_BSHE.flatten(2))  # B S H E -> B S D
        return out_BSD
