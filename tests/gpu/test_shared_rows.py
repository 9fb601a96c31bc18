"""Attention of ranks that share rows on a GPU, against attention to whole rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretraining.context_group import ContextGroup, SharedRows
from pretraining.model.kernels import document_attention
from pretraining.model.shared_rows import locate_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 8, 2, 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["one call", "a call per piece"])
@pytest.mark.parametrize("lengths", [(4096,), (1000, 3, 1, 500, 2592), (1, 4000, 95), (1024,) * 4])
@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_whole_rows(size: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    q, gradient, k, v = (
        torch.randn(1, LENGTH, heads, HEAD_DIM, generator=generator, device="cuda", dtype=dtype)
        for heads in (HEADS, HEADS, KEY_HEADS, KEY_HEADS)
    )
    exact = [each.float().requires_grad_() for each in (q, k, v)]
    expected = document_attention(exact[0], exact[1], exact[2], lengths)
    right = torch.autograd.grad(expected, exact, gradient.float())

    inputs = [each.requires_grad_() for each in (q, k, v)]
    whole, total = torch.stack((k, v)), torch.zeros((), device="cuda")
    for rank in range(size):
        group = ContextGroup(rank, size, lambda part: whole, lambda lost: lost)

        def part(values: Tensor, group: ContextGroup = group) -> Tensor:
            return torch.cat([values[:, chunk] for chunk in group.chunks(LENGTH)], 1)

        reach = locate_rows(SharedRows(group, LENGTH, lengths), q, HEAD_DIM)
        assert (reach.kernel is not None) == (dtype == torch.bfloat16)
        found = reach.attend(part(q), part(k), part(v))
        torch.testing.assert_close(found.float(), part(expected), atol=2e-2, rtol=2e-2)
        total = total + (found * part(gradient)).float().sum()
    largest = max(float(each.abs().max()) for each in right)
    for ours, theirs in zip(torch.autograd.grad(total, inputs), right, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-2 * largest, rtol=2e-2)
