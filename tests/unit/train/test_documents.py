"""With a document mask, documents that share a row train as if each had its own row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from tiny_shape import TINY_SHAPE
from torch import Tensor
from unit.data.packed_rows import Row, pack, packed_rows
from unit.train.test_step import context_for_step, values

from pretraining.data.batch import ModelInputs, StepBatch
from pretraining.model.llama import Llama
from pretraining.train.step import train_step


def llama() -> Llama:
    """With large weights, so that a token of another document would change the result."""
    model = Llama(TINY_SHAPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def inputs_of(width: int, rows: list[Row]) -> ModelInputs:
    return pack(width, rows, vocab_size=TINY_SHAPE.vocab_size).model_inputs()


def loss_of(model: Llama, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
    loss_sum, valid, *_ = model(*inputs)
    return loss_sum, valid


def gradients_of(model: Llama, loss_sum: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss_sum, list(model.parameters())))


def documents_of(width: int, rows: list[Row]) -> list[tuple[int, int, Tensor]]:
    """Return row, offset and tokens of every piece of a document."""
    tokens = pack(width, rows, vocab_size=TINY_SHAPE.vocab_size).tokens_BT.long()
    return [
        (number, sum(row[:index]), tokens[number, sum(row[:index]) :][:length])
        for number, row in enumerate(rows)
        for index, length in enumerate(row)
    ]


@settings(max_examples=30)
@given(packed_rows())
def test_loss_and_gradients_are_the_sums_of_those_of_each_document_alone(batch: tuple[int, list[Row]]) -> None:
    model = llama()
    loss_sum, count = loss_of(model, inputs_of(*batch))
    gradients = gradients_of(model, loss_sum)
    assert all(gradient.isfinite().all() for gradient in gradients)

    expected, expected_count = torch.zeros(()), 0
    summed = [torch.zeros_like(gradient) for gradient in gradients]
    for _, _, tokens in documents_of(*batch):
        if len(tokens) > 1:
            alone, labels, *_ = model(tokens[None, :-1], tokens[None, 1:])
            expected, expected_count = expected + alone.detach(), expected_count + int(labels)
            torch._foreach_add_(summed, gradients_of(model, alone))
    assert int(count) == expected_count
    torch.testing.assert_close(loss_sum, expected, atol=1e-5, rtol=1e-5)
    for gradient, other in zip(gradients, summed, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("single_process")
def test_a_step_is_the_same_whether_documents_share_rows_or_not() -> None:
    rows = [[4, 3, 2], [9], [5, 4]]
    alone = pack(9, [[length] for row in rows for length in row])
    for number, (_, _, tokens) in enumerate(documents_of(9, rows)):
        alone.tokens_BT[number, : len(tokens)] = tokens.int()

    outcomes, weights, spans = [], [], []
    for micro_batches in ([pack(9, rows, vocab_size=TINY_SHAPE.vocab_size), pack(9, [[], [], []])], [alone]):
        context = context_for_step()
        outcomes.append(train_step(context, StepBatch(0, 0, micro_batches), 0))
        weights.append(values(context))
        context.collector.end_step(outcomes[-1])
        spans.append(context.collector.report(outcomes[-1])[1])
    for outcome in outcomes:
        assert int(outcome.valid_tokens) == sum(length - 1 for row in rows for length in row)
        assert float(outcome.loss_sum) == pytest.approx(float(outcomes[0].loss_sum), rel=1e-6)
        assert float(outcome.grad_norm) == pytest.approx(float(outcomes[0].grad_norm), rel=1e-5)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # The last token of a row is only a label: 4 + 3 + 1, 8, 5 + 3, and three rows of padding.
    assert spans[0] == pytest.approx((16 + 9 + 1 + 64 + 25 + 9 + 3 * 64) / 48)
