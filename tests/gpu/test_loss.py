"""The loss in chunks on a GPU: the gradients of all logits at once, a fraction of their memory, no wait of the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.config.training import IGNORED_LABEL
from pretraining.model.loss import head_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, HIDDEN, VOCABULARY = 4096, 512, 32000


def draw() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=generator, device="cuda")
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda") / HIDDEN**0.5
    labels = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator, device="cuda")
    labels[:, ::10] = IGNORED_LABEL
    return hidden.bfloat16().requires_grad_(), head.bfloat16().requires_grad_(), labels


@pytest.mark.parametrize("chunk_tokens", [None, 500, 0])
def test_loss_and_gradients_are_those_of_all_logits_at_once(chunk_tokens: int | None) -> None:
    hidden, head, labels = draw()
    loss_sum, *_ = head_loss(hidden, head, labels, chunk_tokens)
    inputs, exact = [hidden, head], [each.detach().float().requires_grad_() for each in (hidden, head)]
    expected = F.cross_entropy(F.linear(exact[0], exact[1]).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=1e-3, atol=0)
    for ours, right in zip(
        torch.autograd.grad(loss_sum / TOKENS, inputs), torch.autograd.grad(expected / TOKENS, exact), strict=True
    ):
        assert (ours.float() - right).norm() < 1e-2 * right.norm()


def test_chunks_bound_the_memory_and_the_host_does_not_wait() -> None:
    hidden, head, labels = draw()
    head_loss(hidden, head, labels, 512)[0].backward()  # what libraries set up once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        head_loss(hidden, head, labels, 512, z_loss_weight=1e-4)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Logits in bfloat16, and in float32 before and after the softmax; the head's gradient in float32 and bfloat16.
    logits_bytes, head_bytes = 512 * VOCABULARY * 10, VOCABULARY * HIDDEN * 8
    assert torch.cuda.max_memory_allocated() - before < 1.2 * (logits_bytes + head_bytes) + 3 * hidden.nbytes
