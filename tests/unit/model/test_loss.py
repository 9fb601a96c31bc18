"""The loss from hidden states, in chunks, is the plain cross-entropy of all logits, and so are its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pretraining.config.training import IGNORED_LABEL
from pretraining.estimate.memory import loss_chunk_tokens
from pretraining.model.loss import head_loss

B, S, D, V = 3, 5, 7, 11


def draw_inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(*size, D, generator=generator, dtype=torch.float64) for size in ((B, S), (V,)))
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def draw_labels(ignored: float = 0.2, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(V, (B, S), generator=generator)
    return labels.masked_fill(torch.rand(B, S, generator=generator) < ignored, IGNORED_LABEL)


def plain_loss(hidden: Tensor, head: Tensor, labels: Tensor, z_loss_weight: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the objective and its z-loss from all logits at once."""
    logits = F.linear(hidden, head).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.flatten()
    z_loss = z_loss_weight * logits.logsumexp(-1)[labels != IGNORED_LABEL].square().sum()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum") + z_loss, z_loss


TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(list(TOLERANCES)),
    chunk_tokens=st.one_of(st.none(), st.integers(0, B * S + 2)),
    z_loss_weight=st.sampled_from([0.0, 1e-4, 0.1]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    above=st.sampled_from([1.0, 0.125, 1 / 3]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    dtype: torch.dtype, chunk_tokens: int | None, z_loss_weight: float, ignored: float, above: float, seed: int
) -> None:
    inputs, labels = draw_inputs(dtype, seed), draw_labels(ignored, seed)
    objective_sum, valid_count, z_loss_sum, *_ = head_loss(*inputs, labels, chunk_tokens, z_loss_weight)
    expected, expected_z_loss = plain_loss(*inputs, labels, z_loss_weight)
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(objective_sum, expected, rtol=relative, atol=absolute)
    torch.testing.assert_close(z_loss_sum, expected_z_loss, rtol=relative, atol=absolute)
    assert valid_count == (labels != IGNORED_LABEL).sum() and valid_count.dtype == torch.int64
    found = torch.autograd.grad(objective_sum * above, inputs)
    for gradient, right in zip(found, torch.autograd.grad(expected * above, inputs), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, right, rtol=relative, atol=absolute * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("grad", [True, False])
def test_each_token_keeps_its_loss_and_whether_its_label_is_the_likeliest(grad: bool) -> None:
    (hidden, head), labels = draw_inputs(torch.float32), draw_labels()
    labels[0, 1] = int(F.linear(hidden, head)[0, 1].argmax())
    with torch.set_grad_enabled(grad):
        loss = head_loss(hidden, head, labels, chunk_tokens=4)
    logits = F.linear(hidden, head).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="none", ignore_index=IGNORED_LABEL)
    losses_BS, hits_BS = loss.tokens_BS2.unbind(2)
    torch.testing.assert_close(losses_BS.flatten(), expected)
    assert torch.equal(hits_BS.bool(), F.linear(hidden, head).argmax(2) == labels) and hits_BS[0, 1] == 1
    assert not loss.tokens_BS2.requires_grad and loss.objective_sum.requires_grad == grad


def test_large_bfloat16_logits_do_not_overflow() -> None:
    head = torch.zeros(V, D, dtype=torch.bfloat16)
    head[3] = 1e4
    hidden = torch.ones(1, 1, D, dtype=torch.bfloat16)
    loss_sum, *_ = head_loss(hidden, head, torch.tensor([[3]]))
    assert loss_sum == 0


@pytest.mark.parametrize("above", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_reaches_both_inputs(above: float) -> None:
    inputs = draw_inputs(torch.float32)
    objective_sum, *_ = head_loss(*inputs, draw_labels(), 4)
    objective_sum.backward(torch.tensor(above))
    for each in inputs:
        assert each.grad is not None and not each.grad.isfinite().all()


def test_the_gradient_of_the_head_is_summed_over_chunks_in_float32() -> None:
    """In bfloat16, where 256 + 1 is 256, a sum over 600 chunks would stop growing."""
    hidden = torch.ones(1, 600, 1, dtype=torch.bfloat16, requires_grad=True)
    head = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss_sum, *_ = head_loss(hidden, head, torch.zeros(1, 600, dtype=torch.int64), chunk_tokens=1)
    loss_sum.backward()
    assert head.grad is not None and head.grad.flatten().tolist() == [-300, 300]


@pytest.mark.parametrize(("vocab_size", "tokens"), [(4096, 65536), (32000, 8192), (128256, 2048), (2**28, 256)])
def test_chunks_are_chosen_by_the_memory_of_their_logits_and_small_on_a_cpu(vocab_size: int, tokens: int) -> None:
    assert (loss_chunk_tokens("cuda", vocab_size), loss_chunk_tokens("cpu", vocab_size)) == (tokens, 256)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("grad", [True, False])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(grad: bool) -> None:
    tokens, hidden_size, vocab_size, chunk_tokens = 96, 4, 50, 12
    hidden = torch.randn(2, tokens // 2, hidden_size, requires_grad=True)
    head = torch.randn(vocab_size, hidden_size, requires_grad=True)
    labels = torch.zeros(2, tokens // 2, dtype=torch.int64)
    with LargestTensor() as largest, torch.set_grad_enabled(grad):
        objective_sum, *_ = head_loss(hidden, head, labels, chunk_tokens, z_loss_weight=0.1)
        if grad:
            objective_sum.backward()
    assert largest.elements == chunk_tokens * vocab_size


def test_backward_needs_two_saved_gradients_and_frees_them() -> None:
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective_sum, *_ = head_loss(*draw_inputs(), draw_labels(), 4)
    assert sorted(saved) == [V * D, B * S * D]
    objective_sum.backward()
    with pytest.raises(RuntimeError, match="second time"):
        objective_sum.backward()
