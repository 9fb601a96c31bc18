"""Causal self-attention with grouped queries (Ainslie et al. 2023, GQA).

H query heads share K key/value heads, H/K queries to each; K = H is plain multi-head attention. The kernel is PyTorch's
`scaled_dot_product_attention`: a flash kernel where the device has one, which never holds an S x S matrix.

Attention may stay inside each document of a row, which costs less: the cost grows with the squares of lengths. A GPU
takes all documents in one call of a flash kernel for sequences of various lengths; elsewhere each has its own call.

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
    """Where documents lie, for a kernel that takes all of them at once.

    Attributes:
        bounds: int32 [documents + 1] on the device: where documents begin in the flattened [B * S] tokens, and B * S.
        longest: no document has more tokens.
    """

    bounds: Tensor
    longest: int


Documents = tuple[int, ...] | DocumentBounds
"""Documents that lie end to end in the flattened [B * S] tokens, none across two rows: their lengths, or bounds."""


Reach: TypeAlias = "Documents | KeyValueCache | None"
"""What tokens attend to: those before them in their document, in a cache and their row, or (None) in their row."""


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

    def forward(self, x_BSD: Tensor, rotation: Rotation, reach: Reach = None) -> Tensor:
        """Mixes every normalised hidden state [B, S, D] with those before it, to be added to the residual stream.

        `rotation` are the tokens' angles (`rope.py`); documents within reach come from `locate_documents`.
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
    """Return softmax(q k / sqrt(E)) v over the tokens up to and including each one: [B, S, H, E].

    Without `is_causal` each of the S tokens sees all keys [B, T, K, E].
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
    """Whether some kernel other than the plain one, which holds S x S matrices, takes fewer key/value heads.

    On CUDA that is the flash kernel alone, which needs half precision and compute capability 8.0. The memory-efficient
    kernel takes what the flash kernel does not, with as many key/value heads as query heads.
    """
    if device.type != "cuda":
        return True
    return dtype in (torch.bfloat16, torch.float16) and torch.cuda.get_device_properties(device).major >= 8


def _repeat_heads(x: Tensor, query_heads: int, dim: int) -> Tensor:
    """Repeats each key/value head for all of its query heads."""
    return x.repeat_interleave(query_heads // x.size(dim), dim=dim)


def locate_documents(document_lengths: tuple[int, ...] | None, x: Tensor, head_dim: int) -> Documents | None:
    """Return documents in the form that suits `document_attention` best; called once a forward pass, for all blocks.

    Args:
        document_lengths: tokens of the documents that lie end to end in the flattened [B * S] tokens, none across two
            rows; None = each row is one document.
        x: a tensor on the device and in the dtype that attention computes with.
        head_dim: E.
    """
    if document_lengths is None or not has_kernel_for_documents(x.device, x.dtype, head_dim):
        return document_lengths
    bounds = bounds_of(document_lengths)
    # From pinned memory, so that the host does not wait for the device.
    return bounds._replace(bounds=bounds.bounds.pin_memory().to(x.device, non_blocking=True))


def has_kernel_for_documents(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether PyTorch's flash kernel for sequences of various lengths runs there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def bounds_of(document_lengths: tuple[int, ...]) -> DocumentBounds:
    """Return the bounds of documents, on the host.

    The longest is rounded up to a power of two: the kernel only makes room by it, and compiled code for one value then
    serves most batches. It is never 1, for which the kernel takes another way, made for decoding.
    """
    bounds = torch.tensor([0, *accumulate(document_lengths)], dtype=torch.int32)
    return DocumentBounds(bounds, 1 << max(1, (max(document_lengths) - 1).bit_length()))


def document_attention(q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents: Documents) -> Tensor:
    """Return causal attention that reaches tokens of the same document only: [B, S, H, E]."""
    q_NHE, k_NKE, v_NKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
    if isinstance(documents, DocumentBounds):
        mixed_NHE = _at_once(q_NHE, k_NKE, v_NKE, documents)
    else:
        mixed_NHE = _one_by_one(q_NHE, k_NKE, v_NKE, documents)
    return mixed_NHE.view_as(q_BSHE)


def _at_once(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, documents: DocumentBounds) -> Tensor:
    """Call the kernel once, telling it where each document begins."""
    from torch.nn.attention.varlen import varlen_attn  # here, since it takes a second to import

    kernel: Callable[..., Any] = varlen_attn
    if q_NHE.size(1) != k_NKE.size(1):
        if "enable_gqa" in signature(varlen_attn).parameters:  # in torch 2.11 it wants K = H
            kernel = partial(kernel, enable_gqa=True)
        else:
            k_NKE, v_NKE = (_repeat_heads(x, q_NHE.size(1), dim=1) for x in (k_NKE, v_NKE))
    bounds, longest = documents
    causal = (-1, 0)  # a window without an end to the left, and nothing to the right
    mixed_NHE: Tensor = kernel(q_NHE, k_NKE, v_NKE, bounds, bounds, longest, longest, window_size=causal)
    return mixed_NHE


def _one_by_one(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, document_lengths: tuple[int, ...]) -> Tensor:
    """Call the kernel for each document, which computes nothing that a mask would throw away.

    On a CPU this is far faster than a masked S x S matrix for long rows, and faster than calls for documents of similar
    lengths padded to one, even where they are short (docs/model.md has the numbers).
    """
    pieces = zip(*(x.split(document_lengths) for x in (q_NHE, k_NKE, v_NKE)), strict=True)
    mixed = [causal_attention(q_nHE[None], k_nKE[None], v_nKE[None]) for q_nHE, k_nKE, v_nKE in pieces]
    return torch.cat(mixed, dim=1)[0]  # 1 n H E of each -> N H E
