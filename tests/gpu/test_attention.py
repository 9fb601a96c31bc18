"""Attention inside documents on a GPU: one call of a flash kernel, against a call of the plain one a document."""

from __future__ import annotations

import pytest
import torch

from pretraining.model.kernels import DocumentBounds, document_attention, locate_documents

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS = {
    "one_document_a_row": [[64], [64]],
    "short_ones": [[1, 1, 2, 60], [30, 34]],
    "a_long_row": [[1000, 3, 1, 500, 2592]],
    "single_tokens": [[1] * 9],
}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_outputs_and_gradients_are_those_of_one_call_a_document(
    rows: list[list[int]], head_dim: int, heads: tuple[int, int]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = tuple(length for row in rows for length in row)
    q, k, v, gradient = (
        torch.randn(len(rows), sum(rows[0]), count, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    inputs = [each.requires_grad_() for each in (q, k, v)]
    documents = locate_documents(lengths, q, head_dim)
    assert isinstance(documents, DocumentBounds)
    found = document_attention(q, k, v, documents)
    exact_q, exact_k, exact_v = exact = [each.detach().float().requires_grad_() for each in inputs]
    expected = document_attention(exact_q, exact_k, exact_v, lengths)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    right = torch.autograd.grad(expected, exact, gradient.float())
    # Of all three: those of queries and keys are zero where a document is one token, but for rounding.
    largest = max(float(each.abs().max()) for each in right)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, gradient), right, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-2 * largest, rtol=2e-2)


def test_the_host_does_not_wait_for_the_device() -> None:
    x = torch.zeros(1, 4096, 8, 64, device="cuda", dtype=torch.bfloat16)
    document_attention(x, x, x, locate_documents((4096,), x, 64) or ())  # what libraries set up once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        document_attention(x, x, x, locate_documents((1000, 3096), x, 64) or ())
    finally:
        torch.cuda.set_sync_debug_mode("default")
