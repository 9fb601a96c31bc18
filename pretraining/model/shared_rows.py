"""Attention of a rank that computes a part of each row (`pretraining/context_group.py`).

    keys and values of the part --gather--> of whole rows -> attention of each piece to its document up to itself

Each layer gathers once in forward, once more if backward recomputes the block, and sums gradients over ranks once.

On a GPU, one call of the variable-length kernel serves all pieces. Keys of its documents may not overlap, but pieces of
both chunks may belong to one document, so the kernel gets a copy of each piece's keys. Other devices make one call per
piece, or per `MASKED_QUERIES` tokens of a piece that continues a document from an earlier chunk, since their kernels
align causal masks at the first key.

Shapes: B batch, S sequence, L tokens of a row on this rank, H query heads, K key/value heads, E head dim; n queries of
a piece, T keys of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pretraining.context_group import SharedRows
from pretraining.model.kernels import (
    DocumentBounds,
    causal_attention,
    document_bounds,
    has_kernel_for_documents,
    send_bounds,
    varlen_attention,
)

MASKED_QUERIES = 1024
"""Most queries in a call with a mask: few masked values are computed, and the mask stays small."""


class KernelInputs(NamedTuple):
    """Inputs of the variable-length kernel for all pieces, on the device.

    Attributes:
        keys: int64, places of the copied keys in the flattened [B * S] tokens.
        query_bounds, key_bounds: bounds of the pieces in queries and in copied keys.
    """

    keys: Tensor
    query_bounds: DocumentBounds
    key_bounds: DocumentBounds


@dataclass(frozen=True)
class PartialRows:
    """The tokens that a part of rows attends to.

    Attributes:
        kernel: None = this device has no variable-length kernel.
        mask_MS: `shifted_mask` for the calls per piece; None = there is a kernel.
    """

    rows: SharedRows
    kernel: KernelInputs | None = None
    mask_MS: Tensor | None = None

    def attend(self, q_BLHE: Tensor, k_BLKE: Tensor, v_BLKE: Tensor, scale: float | None = None) -> Tensor:
        """Return the attention of this rank's tokens, [B, L, H, E]; a collective call of the group."""
        gathered = self.rows.group.gather(torch.stack((k_BLKE, v_BLKE)))
        k_MKE, v_MKE = gathered.flatten(1, 2).unbind(0)  # 2 B S K E -> B * S K E
        q_NHE = q_BLHE.flatten(0, 1)
        if self.kernel is None:
            pieces = [(q_NHE[queries], k_MKE[keys], v_MKE[keys]) for queries, keys in self.rows.pieces]
            mixed_NHE = torch.cat([attend_to_prefix(*piece, self.mask_MS, scale) for piece in pieces])
        else:
            keys, query_bounds, key_bounds = self.kernel
            mixed_NHE = varlen_attention(q_NHE, k_MKE[keys], v_MKE[keys], query_bounds, key_bounds, scale)
        return mixed_NHE.view_as(q_BLHE)


def locate_rows(rows: SharedRows, x: Tensor, head_dim: int) -> PartialRows:
    """Return the tokens that a part of rows attends to, for this device, once per forward pass.

    Args:
        x: a tensor with attention's device and dtype.
        head_dim: E.
    """
    if not has_kernel_for_documents(x.device, x.dtype, head_dim):
        longest = max(keys.stop - keys.start for queries, keys in rows.pieces)
        return PartialRows(rows, mask_MS=shifted_mask(longest, x))
    keys, query_bounds, key_bounds = kernel_inputs(rows)
    sent = (send_bounds(bounds, x.device) for bounds in (query_bounds, key_bounds))
    return PartialRows(rows, KernelInputs(keys.pin_memory().to(x.device, non_blocking=True), *sent))


def kernel_inputs(rows: SharedRows) -> KernelInputs:
    """Return the inputs of the kernel, on the host.

    The kernel aligns the last query of a piece with its last key.
    """
    queries, keys = zip(*rows.pieces, strict=True)
    lengths = ([place.stop - place.start for place in places] for places in (queries, keys))
    copied = torch.cat([torch.arange(place.start, place.stop) for place in keys])
    return KernelInputs(copied, *(document_bounds(tuple(length)) for length in lengths))


def shifted_mask(longest: int, x: Tensor) -> Tensor:
    """Return a mask from which `attend_to_prefix` cuts all of its masks: [M, longest + M], M = MASKED_QUERIES.

    Row i is 0 up to column longest + i, and -inf behind it. On a CPU, all layers keep this one tensor for backward.
    """
    mask = x.new_full((MASKED_QUERIES, longest + MASKED_QUERIES), -torch.inf, requires_grad=False)
    return mask.triu_(longest + 1)


def attend_to_prefix(
    q_nHE: Tensor, k_TKE: Tensor, v_TKE: Tensor, mask_MS: Tensor | None, scale: float | None
) -> Tensor:
    """Return the attention of the last n of T tokens to their predecessors and themselves: [n, H, E].

    Args:
        mask_MS: `shifted_mask`.
    """
    earlier = len(k_TKE) - len(q_nHE)
    if earlier == 0:
        return causal_attention(q_nHE[None], k_TKE[None], v_TKE[None], scale)[0]
    assert mask_MS is not None
    mixed = []
    for q_mHE in q_nHE.split(MASKED_QUERIES):
        earlier += len(q_mHE)  # keys up to the last of these queries
        first = mask_MS.size(1) - MASKED_QUERIES + len(q_mHE) - earlier
        mask_mt = mask_MS[: len(q_mHE), first : first + earlier]
        if mask_mt.is_cuda:  # the kernel needs aligned rows
            mask_mt = mask_mt.contiguous()
        mixed.append(causal_attention(q_mHE[None], k_TKE[None, :earlier], v_TKE[None, :earlier], scale, mask_mt)[0])
    return torch.cat(mixed)
