"""Attention inside documents, against a dense mask; the kernel of each device."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.nn.functional as F
from emulated_varlen import emulated_varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention.varlen import varlen_attn

from pretraining.model import kernels
from pretraining.model.kernels import document_attention, document_bounds, has_kernel_for_documents

Rows = list[list[int]]  # lengths of the documents of each row


@st.composite
def equally_long_rows(draw: st.DrawFn, multiple: int = 1) -> Rows:
    """Draw rows of a length that is a multiple of this number, cut into documents."""
    length, rows = multiple * draw(st.integers(1, 24 // multiple)), []
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


@settings(max_examples=100)
@given(equally_long_rows(), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_outputs_and_gradients_are_those_of_a_dense_mask(rows: Rows, heads: tuple[int, int]) -> None:
    inputs = draw_heads(rows, *heads)
    found = document_attention(*inputs, tuple(length for row in rows for length in row))
    assert_same_gradients(found, masked_attention(*inputs, rows), inputs, 1e-5)


@given(equally_long_rows())
def test_bounds_are_where_documents_begin_and_room_for_the_longest(rows: Rows) -> None:
    lengths = tuple(length for row in rows for length in row)
    bounds, longest = document_bounds(lengths)
    assert bounds.dtype == torch.int32
    assert bounds.tolist() == [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    assert max(2, max(lengths)) <= longest < 2 * max(2, max(lengths)) and longest.bit_count() == 1


def assert_same_gradients(found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], tolerance: float) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    both = (torch.autograd.grad(each, inputs, weights) for each in (found, expected))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


def ungrouped_kernel(q: Tensor, k: Tensor, v: Tensor, *where: Any, window_size: Any) -> Any:
    """`varlen_attn` of torch 2.11, which needs as many key heads as query heads."""
    assert q.size(1) == k.size(1)
    return varlen_attn(q, k, v, *where, window_size=window_size)


@pytest.mark.parametrize("kernel", [varlen_attn, ungrouped_kernel])
@settings(max_examples=30)
@given(equally_long_rows(), st.sampled_from([(2, 2), (4, 2), (3, 1)]))
def test_one_call_does_what_many_calls_do(kernel: Any, rows: Rows, heads: tuple[int, int]) -> None:
    inputs, lengths = draw_heads(rows, *heads), tuple(length for row in rows for length in row)
    with emulated_varlen() as calls, patch("torch.nn.attention.varlen.varlen_attn", kernel):
        found = document_attention(*inputs, document_bounds(lengths))
        assert_same_gradients(found, document_attention(*inputs, lengths), inputs, 1e-6)
    assert calls == ["forward", "backward"]


HALF, WHOLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "documents", "groups"),
    [
        ("cuda", HALF, 128, (9, 0), True, True),
        ("cuda", torch.float16, 256, (8, 0), True, True),
        ("cuda", WHOLE, 128, (9, 0), False, False),
        *(("cuda", HALF, odd, (9, 0), False, True) for odd in (12, 264)),
        ("cuda", torch.float16, 128, (7, 5), False, False),
        ("cpu", HALF, 128, (9, 0), False, True),
    ],
)
def test_a_gpu_with_a_flash_kernel_takes_all_documents_at_once_and_groups_heads(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    documents: bool,
    groups: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = torch.device(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=capability[0]))
    assert kernels.has_kernel_for_grouped_heads(where, dtype) is groups
    for is_built in (True, False):
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda is_built=is_built: is_built)
        assert has_kernel_for_documents(where, dtype, head_dim) is (documents and is_built)


def test_heads_are_repeated_where_no_kernel_groups_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw_heads([[5], [5]], 6, 2)
    expected = kernels.causal_attention(*inputs)
    kernel = Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(kernels, "has_kernel_for_grouped_heads", lambda device, dtype: False)
    found = kernels.causal_attention(*inputs)
    assert kernel.call_args.args[1].size(1) == 6 and not kernel.call_args.kwargs["enable_gqa"]
    assert_same_gradients(found, expected, inputs, 1e-6)


def test_the_kernel_for_documents_compiles_as_a_whole_graph_and_few_graphs_serve_all_layouts() -> None:
    """Forward and backward on meta tensors with grouped heads, because the kernel needs CUDA."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(document_attention, fullgraph=True, backend=backend)
    for lengths in [(5, 3), (4, 4), (8,), (1,) * 8, (7, 1)]:
        q, k, v = (
            torch.randn(1, 8, heads, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
        )
        bounds = document_bounds(lengths)
        mixed = compiled(q, k, v, bounds._replace(bounds=bounds.bounds.to("meta")))
        mixed.sum().backward()
        assert mixed.shape == q.shape and k.grad is not None and k.grad.shape == k.shape
    assert len(graphs) <= 3
