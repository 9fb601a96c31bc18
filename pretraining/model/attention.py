"""Causal self-attention with grouped queries (Ainslie et al. 2023, GQA).

H query heads share K key/value heads, H/K queries to each; K = H is plain multi-head attention. The kernel is PyTorch's
`scaled_dot_product_attention`: a flash kernel where the device has one, which never holds an S x S matrix.

Shapes: B batch, S sequence, D hidden, H query heads, K key/value heads, E head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.variants import LlamaShape
from pretraining.model.rope import Rotation, rotate


class Attention(nn.Module):
    """Self-attention of one block; layers are named as in Hugging Face's Llama."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        key_value_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, rotation: Rotation) -> Tensor:
        """Mixes every token with those before it.

        Args:
            x_BSD: normalised hidden states [B, S, D].
            rotation: the tokens' angles, see `rope.py`.

        Returns:
            [B, S, D], to be added to the residual stream.
        """
        q_BSHE = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        mixed_BSHE = causal_attention(rotate(q_BSHE, rotation), rotate(k_BSKE, rotation), v_BSKE)
        return self.o_proj(mixed_BSHE.flatten(2))  # B S H E -> B S D


def causal_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
    """Softmax(q k / sqrt(E)) v over the tokens up to and including each one: [B, S, H, E]."""
    grouped = q_BSHE.size(2) != k_BSKE.size(2)
    mixed_BHSE = F.scaled_dot_product_attention(
        q_BSHE.transpose(1, 2),  # B S H E -> B H S E
        k_BSKE.transpose(1, 2),
        v_BSKE.transpose(1, 2),
        is_causal=True,
        enable_gqa=grouped,
    )
    return mixed_BHSE.transpose(1, 2)  # B H S E -> B S H E
