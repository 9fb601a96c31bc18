"""Causal self-attention with grouped queries (Ainslie et al. 2023, GQA).

H query heads share K key/value heads; K = H is plain multi-head attention. PyTorch's `scaled_dot_product_attention`
uses a flash kernel if the device has one, which never holds an S x S matrix.

A document mask keeps attention inside each document, and makes it cheaper: the cost grows with the square of lengths.
A GPU handles all documents in one call of a variable-length flash kernel; other devices make one call per document.

Shapes: B batch, S sequence, D hidden, H query heads, K key/value heads, E head dim; n tokens of one document; T keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretraining.config.variants import LlamaShape
from pretraining.model.rope import Rotation, rotate

if TYPE_CHECKING:
    from pretraining.model.cache import KeyValueCache


class DocumentBounds(NamedTuple):
    """The documents of a micro-batch, for the variable-length kernel.

    Attributes:
        bounds: int32 [documents + 1] on the device: starts of documents in the flattened [B * S] tokens, then B * S.
        longest: upper bound of the documents' lengths.
    """

    bounds: Tensor
    longest: int


Documents = tuple[int, ...] | DocumentBounds
"""Lengths or bounds of documents that lie end to end in the flattened [B * S] tokens; no document crosses rows."""


Reach: TypeAlias = "Documents | KeyValueCache | None"
"""The earlier tokens that a token attends to: in its document, in a cache and its row, or (None) in its row."""


class Attention(nn.Module):
    """Self-attention of one block, with the layer names of Hugging Face's Llama."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        key_value_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_value_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_value_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, rotation: Rotation, reach: Reach = None) -> Tensor:
        """Return the attention output [B, S, D] of normalised hidden states [B, S, D].

        `rotation` comes from `compute_rotation`, documents in `reach` from `locate_documents`.
        """
        q_BSHE = self.q_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.k_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHE, k_BSKE = rotate(q_BSHE, rotation), rotate(k_BSKE, rotation)
        if reach is None:
            mixed_BSHE = causal_attention(q_BSHE, k_BSKE, v_BSKE)
        elif isinstance(reach, tuple):
            mixed_BSHE = document_attention(q_BSHE, k_BSKE, v_BSKE, reach)
        else:
            mixed_BSHE = reach.attend(q_BSHE, k_BSKE, v_BSKE)
        out_BSD: Tensor = self.o_proj(mixed_BSHE.flatten(2))  # B S H E -> B S D
        return out_BSD


def causal_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, is_causal: bool = True) -> Tensor:
    """Return softmax(q k / sqrt(E)) v over each token and its predecessors: [B, S, H, E].

    Without `is_causal`, each of the S tokens attends to all keys [B, T, K, E].
    """
    grouped = q_BSHE.size(2) != k_BSKE.size(2)
    if grouped and not has_kernel_for_grouped_heads(q_BSHE.device, q_BSHE.dtype):
        k_BSKE, v_BSKE = (_repeat_heads(x, q_BSHE.size(2), dim=2) for x in (k_BSKE, v_BSKE))
        grouped = False
    mixed_BHSE = F.scaled_dot_product_attention(
        q_BSHE.transpose(1, 2),  # B S H E -> B H S E
        k_BSKE.transpose(1, 2),
        v_BSKE.transpose(1, 2),
        is_causal=is_causal,
        enable_gqa=grouped,
    )
    return mixed_BHSE.transpose(1, 2)  # B H S E -> B S H E


def has_kernel_for_grouped_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel without S x S matrices supports fewer key/value heads than query heads.

    On CUDA only the flash kernel does, with half precision and compute capability 8.0. Otherwise, the memory-efficient
    kernel needs as many key/value heads as query heads.
    """
    if device.type != "cuda":
        return True
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_properties(device).major >= 8


def _repeat_heads(x: Tensor, query_heads: int, dim: int) -> Tensor:
    return x.repeat_interleave(query_heads // x.size(dim), dim=dim)


def locate_documents(document_lengths: tuple[int, ...] | None, x: Tensor, head_dim: int) -> Documents | None:
    """Return documents in the form that `document_attention` needs on this device, once per forward pass.

    Args:
        document_lengths: as in `Llama.forward`.
        x: a tensor with attention's device and dtype.
        head_dim: E.
    """
    if document_lengths is None or not has_kernel_for_documents(x.device, x.dtype, head_dim):
        return document_lengths
    bounds = document_bounds(document_lengths)
    # A copy from pinned memory does not make the host wait.
    return bounds._replace(bounds=bounds.bounds.pin_memory().to(x.device, non_blocking=True))


def has_kernel_for_documents(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether PyTorch's variable-length flash kernel supports a device, dtype and head dim."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def document_bounds(document_lengths: tuple[int, ...]) -> DocumentBounds:
    """Return the bounds of documents, on the host.

    `longest` only sizes the kernel's work space. It is a power of two, so that code compiled for one value serves most
    batches, and at least 2, because 1 selects the kernel's decoding path.
    """
    bounds = torch.tensor([0, *accumulate(document_lengths)], dtype=torch.int32)
    return DocumentBounds(bounds, 1 << max(1, (max(document_lengths) - 1).bit_length()))


def document_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents: Documents) -> Tensor:
    """Return causal attention inside each document: [B, S, H, E]."""
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(documents, DocumentBounds):
        mixed_NHE = _varlen_attention(q_NHE, k_NKE, v_NKE, documents)
    else:
        mixed_NHE = _attention_per_document(q_NHE, k_NKE, v_NKE, documents)
    return mixed_NHE.view_as(q_BSHE)


def _varlen_attention(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, documents: DocumentBounds) -> Tensor:
    """Call the variable-length kernel once for all documents."""
    from torch.nn.attention.varlen import varlen_attn  # here: the import takes a second

    kernel: Callable[..., Any] = varlen_attn
    if q_NHE.size(1) != k_NKE.size(1):
        if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 needs K = H
            kernel = partial(kernel, enable_gqa=True)
        else:
            k_NKE, v_NKE = (_repeat_heads(x, q_NHE.size(1), dim=1) for x in (k_NKE, v_NKE))
    bounds, longest = documents
    causal = (-1, 0)  # a window of all earlier tokens and no later ones
    mixed_NHE: Tensor = kernel(q_NHE, k_NKE, v_NKE, bounds, bounds, longest, longest, window_size=causal)
    return mixed_NHE


def _attention_per_document(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, document_lengths: tuple[int, ...]) -> Tensor:
    """Call the kernel once per document, which computes no masked values.

    On a CPU this is far faster than a masked S x S matrix for long rows. It also beats padding documents of similar
    lengths into one call, even for short documents (docs/model.md has the numbers).
    """
    pieces = zip(*(x.split(document_lengths) for x in (q_NHE, k_NKE, v_NKE)), strict=True)
    mixed = [causal_attention(q_nHE[None], k_nKE[None], v_nKE[None]) for q_nHE, k_nKE, v_nKE in pieces]
    return torch.cat(mixed, dim=1)[0]  # 1 n H E per document -> N H E
