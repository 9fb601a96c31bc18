"""Calls of attention kernels: PyTorch's `scaled_dot_product_attention`, and one for documents of various lengths.

`scaled_dot_product_attention` uses a flash kernel if the device has one, which never holds an S x S matrix.

A document mask keeps attention inside each document, and makes it cheaper: the cost grows with the square of lengths.
A GPU handles all documents in one call of a variable-length flash kernel; other devices make one call per document.

Shapes: B batch, S sequence, H query heads, K key/value heads, E head dim; N = B * S; n tokens of a document; T keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def causal_attention(
    q_BSHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    scale: float | None = None,
    mask_ST: Tensor | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Return softmax(scale q k) v over each token and its predecessors: [B, S, H, E].

    Args:
        scale: None = 1 / sqrt(E).
        mask_ST: added to the scores of the keys [B, T, K, E]; None = as `is_causal` says.
        is_causal: otherwise each token attends to all keys [B, T, K, E].
    """
    grouped = q_BSHE.size(2) != k_BSKE.size(2)
    if grouped and not has_kernel_for_grouped_heads(q_BSHE.device, q_BSHE.dtype):
        k_BSKE, v_BSKE = (_repeat_heads(x, q_BSHE.size(2), dim=2) for x in (k_BSKE, v_BSKE))
        grouped = False
    mixed_BHSE = F.scaled_dot_product_attention(
        q_BSHE.transpose(1, 2),  # B S H E -> B H S E
        k_BSKE.transpose(1, 2),
        v_BSKE.transpose(1, 2),
        attn_mask=mask_ST,
        is_causal=is_causal and mask_ST is None,
        scale=scale,
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
    return send_bounds(document_bounds(document_lengths), x.device)


def send_bounds(documents: DocumentBounds, device: torch.device) -> DocumentBounds:
    """Copy bounds to a device. A copy from pinned memory does not make the host wait."""
    return documents._replace(bounds=documents.bounds.pin_memory().to(device, non_blocking=True))


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


def document_attention(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents: Documents, scale: float | None = None
) -> Tensor:
    """Return causal attention inside each document: [B, S, H, E]; `scale` is that of `causal_attention`."""
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(documents, DocumentBounds):
        mixed_NHE = varlen_attention(q_NHE, k_NKE, v_NKE, documents, documents, scale)
    else:
        mixed_NHE = _attention_per_document(q_NHE, k_NKE, v_NKE, documents, scale)
    return mixed_NHE.view_as(q_BSHE)


def varlen_attention(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, queries: DocumentBounds, keys: DocumentBounds, scale: float | None
) -> Tensor:
    """Call the variable-length kernel once for all documents, whose last queries and keys belong to the same token."""
    from torch.nn.attention.varlen import varlen_attn  # here: the import takes a second

    kernel: Callable[..., Any] = varlen_attn if scale is None else partial(varlen_attn, scale=scale)
    if q_NHE.size(1) != k_NKE.size(1):
        if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 needs K = H
            kernel = partial(kernel, enable_gqa=True)
        else:
            k_NKE, v_NKE = (_repeat_heads(x, q_NHE.size(1), dim=1) for x in (k_NKE, v_NKE))
    # The window is all earlier tokens, and no later ones.
    mixed_NHE: Tensor = kernel(
        q_NHE, k_NKE, v_NKE, queries.bounds, keys.bounds, queries.longest, keys.longest, window_size=(-1, 0)
    )
    return mixed_NHE


def _attention_per_document(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, document_lengths: tuple[int, ...], scale: float | None
) -> Tensor:
    """Call the kernel once per document, which computes no masked values.

    On a CPU this is far faster than a masked S x S matrix for long rows. It also beats padding documents of similar
    lengths into one call, even for short documents (docs/model.md has the numbers).
    """
    pieces = zip(*(x.split(document_lengths) for x in (q_NHE, k_NKE, v_NKE)), strict=True)
    mixed = [causal_attention(q_nHE[None], k_nKE[None], v_nKE[None], scale) for q_nHE, k_nKE, v_nKE in pieces]
    return torch.cat(mixed, dim=1)[0]  # 1 n H E per document -> N H E
