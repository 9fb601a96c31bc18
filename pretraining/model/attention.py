"""Causal self-attention with grouped queries (Ainslie et al. 2023, GQA).

H query heads share K key/value heads, H/K queries to each; K = H is plain multi-head attention. The kernel is PyTorch's
`scaled_dot_product_attention`: a flash kernel where the device has one, which never holds an S x S matrix.

Where a row holds several documents, attention may be kept inside each of them. Then it also costs less: its cost grows
with the squares of the documents' lengths, not with that of the row's.

Shapes: B batch, S sequence, D hidden, H query heads, K key/value heads, E head dim; n tokens of one document.
"""

from __future__ import annotations

import torch
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

    def forward(self, x_BSD: Tensor, rotation: Rotation, document_lengths: tuple[int, ...] | None = None) -> Tensor:
        """Mixes every token with those before it.

        Args:
            x_BSD: normalised hidden states [B, S, D].
            rotation: the tokens' angles, see `rope.py`.
            document_lengths: see `document_attention`; None = each row is one document.

        Returns:
            [B, S, D], to be added to the residual stream.
        """
        q_BSHE = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHE, k_BSKE = rotate(q_BSHE, rotation), rotate(k_BSKE, rotation)
        if document_lengths is None:
            mixed_BSHE = causal_attention(q_BSHE, k_BSKE, v_BSKE)
        else:
            mixed_BSHE = document_attention(q_BSHE, k_BSKE, v_BSKE, document_lengths)
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


def document_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, document_lengths: tuple[int, ...]) -> Tensor:
    """Causal attention that reaches tokens of the same document only: [B, S, H, E].

    One call of the kernel a document. It computes nothing that a mask would throw away: in long rows on a CPU it is far
    faster than a masked S x S matrix, and it is faster than calls for documents of similar lengths, padded to one, even
    where documents are short (docs/model.md has the numbers). A kernel for sequences of various lengths, where a device
    has one, would take the same flattened tensors in one call, and belongs here.

    Args:
        q_BSHE: queries.
        k_BSKE: keys.
        v_BSKE: values.
        document_lengths: tokens of the documents that lie end to end in the flattened [B * S] tokens; their sum is
            B * S, and none crosses from one row to the next.
    """
    documents = zip(*(x.flatten(0, 1).split(document_lengths) for x in (q_BSHE, k_BSKE, v_BSKE)), strict=True)
    mixed = [causal_attention(q_nHE[None], k_nKE[None], v_nKE[None]) for q_nHE, k_nKE, v_nKE in documents]
    return torch.cat(mixed, dim=1).view_as(q_BSHE)  # 1 n H E of each -> B S H E
