"""The loss is a sum of negative log-likelihoods over valid labels, and their number."""

from __future__ import annotations

import math

import pytest
import torch

from pretraining.model.loss import IGNORED_LABEL, cross_entropy_sum


def random_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))).to(dtype)


def random_labels() -> torch.Tensor:
    labels = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))
    labels[0, 1] = labels[1, 4] = IGNORED_LABEL
    return labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_brute_force(dtype: torch.dtype) -> None:
    logits, labels = random_logits(dtype), random_labels()
    expected = 0.0
    for row, row_labels in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if row_labels != IGNORED_LABEL:
            expected += math.log(sum(math.exp(value) for value in row)) - row[row_labels]
    loss_sum, valid_count = cross_entropy_sum(logits, labels)
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() == pytest.approx(expected, rel=1e-6)
    assert valid_count.dtype == torch.int64
    assert valid_count.item() == 8


def test_the_gradient_is_softmax_minus_target_and_zero_where_ignored() -> None:
    logits, labels = random_logits().requires_grad_(), random_labels()
    loss_sum, _ = cross_entropy_sum(logits, labels)
    (gradient,) = torch.autograd.grad(loss_sum, logits)
    valid = labels != IGNORED_LABEL
    expected = logits.softmax(-1) - torch.nn.functional.one_hot(labels.clamp(min=0), 11)
    torch.testing.assert_close(gradient, expected * valid[..., None])


def test_sums_of_parts_add_up_to_the_sum_of_the_whole() -> None:
    """What lets micro-batches and ranks share a global batch."""
    logits, labels = random_logits(), random_labels()
    whole_sum, whole_count = cross_entropy_sum(logits, labels)
    parts = [cross_entropy_sum(logits[i : i + 1], labels[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole_sum)
    assert parts[0][1] + parts[1][1] == whole_count


def test_all_ignored_is_zero_with_a_zero_gradient() -> None:
    logits = random_logits().requires_grad_()
    loss_sum, valid_count = cross_entropy_sum(logits, torch.full((2, 5), IGNORED_LABEL))
    (gradient,) = torch.autograd.grad(loss_sum, logits)
    assert loss_sum == 0
    assert valid_count == 0
    assert torch.equal(gradient, torch.zeros_like(logits))


def test_large_bfloat16_logits_do_not_overflow() -> None:
    logits = torch.zeros(1, 1, 11, dtype=torch.bfloat16)
    logits[..., 3] = 1e4
    loss_sum, _ = cross_entropy_sum(logits, torch.tensor([[3]]))
    assert loss_sum == 0
