"""Attention inside documents, against a dense mask of who may look at whom."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pretraining.model.attention import causal_attention, document_attention

Rows = list[list[int]]  # lengths of the documents of each row


@st.composite
def equally_long_rows(draw: st.DrawFn) -> Rows:
    length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        borders = [0, *sorted(draw(st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set()))), length]
        rows.append([end - begin for begin, end in pairwise(borders)])
    return rows


def draw_heads(rows: Rows, heads: int, key_value_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(map(len, rows)))
    size = (len(rows), sum(rows[0]))
    q, k, v = (torch.randn(*size, count, 8, generator=generator) for count in (heads, key_value_heads, key_value_heads))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def masked_attention(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    documents_BS = torch.tensor([[number for number, n in enumerate(row) for _ in range(n)] for row in rows])
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    mask_B1SS = (same_BSS & torch.ones_like(same_BSS).tril())[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS, enable_gqa=True).transpose(1, 2)


@settings(max_examples=100, deadline=None)
@given(equally_long_rows(), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_outputs_and_gradients_are_those_of_a_dense_mask(rows: Rows, heads: tuple[int, int]) -> None:
    inputs = draw_heads(rows, *heads)
    found = document_attention(*inputs, tuple(length for row in rows for length in row))
    expected = masked_attention(*inputs, rows)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_rows_of_one_document_are_plain_causal_attention() -> None:
    inputs = draw_heads([[7], [7]], 4, 2)
    torch.testing.assert_close(document_attention(*inputs, (7, 7)), causal_attention(*inputs))


def test_lengths_that_do_not_fill_the_rows_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="split"):
        document_attention(*draw_heads([[7]], 2, 2), (3, 3))
