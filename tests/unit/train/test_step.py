"""A training step: gradients, clipping, skipped updates, the scale of a loss in half precision, documents in rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_model import single_dims
from tiny_shape import TINY_SHAPE
from unit.data.packed_rows import pack

from pretraining.config.training import LossConfig, OptimizerConfig
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.distributed.grad_norm import local_part
from pretraining.distributed.loss_scaler import LossScaler
from pretraining.distributed.unsharded import ReplicatedModel
from pretraining.model.init import initialize_parameters
from pretraining.model.llama import Llama
from pretraining.observability.collector import Collector
from pretraining.observability.metrics import Metrics
from pretraining.optim.horizon import Horizon
from pretraining.optim.registry import build_optimizer
from pretraining.optim.schedules import LearningRate
from pretraining.train.step import StepContext, train_step

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("single_process")


def context_for_step(dtype: torch.dtype = torch.float32, loss: LossConfig = LossConfig()) -> StepContext:
    dims = single_dims()
    model = Llama(TINY_SHAPE, loss)
    laid_out = ReplicatedModel(model, dtype, CPU, dims.group("replicate"))
    initialize_parameters(laid_out.parameters, TINY_SHAPE, 0, CPU)
    optimizer = build_optimizer(laid_out.parameters, OptimizerConfig(learning_rate=1e-2))
    return StepContext(
        model=laid_out,
        optimizer=optimizer,
        learning_rate=LearningRate("cosine", Horizon(1, 10, 0.1)),
        grad_clip_thresh=1.0,
        shard_group=dims.group("shard"),
        device=CPU,
        collector=Collector(Metrics(), ["dummy"], optimizer, dims.group("shard")),
        scaler=LossScaler(CPU) if dtype == torch.float16 else None,
    )


def sequences(count: int) -> torch.Tensor:
    return torch.randint(TINY_SHAPE.vocab_size, (count, 9), generator=torch.Generator().manual_seed(1)).to(torch.int32)


def micro_batches(tokens: torch.Tensor, size: int) -> StepBatch:
    """Return sequences in micro-batches of a size; padding rows fill the last one."""
    parts = []
    for part in tokens.split(size):
        padding = size - len(part)
        rows = torch.cat([part, torch.zeros(padding, part.shape[1], dtype=part.dtype)])
        lengths = torch.tensor([part.shape[1]] * len(part) + [0] * padding)
        parts.append(MicroBatch(rows, lengths))
    return StepBatch(0, 0, parts)


def values(context: StepContext) -> list[torch.Tensor]:
    kept = [value for state in context.optimizer.state.values() for value in state.values()]
    return [local_part(tensor).detach().clone() for tensor in (*context.model.parameters.values(), *kept)]


def test_each_micro_batch_is_progress_that_the_watchdog_sees() -> None:
    context = context_for_step()
    train_step(context, micro_batches(sequences(6), 2), 0)
    assert context.activity.events == 3


def test_a_step_uses_the_schedule_and_clears_the_gradients() -> None:
    context = context_for_step()
    assert [train_step(context, micro_batches(sequences(2), 2), step).learning_rate for step in (0, 1)] == [5e-3, 1e-2]
    assert all(parameter.grad is None for parameter in context.model.parameters.values())


def test_gradients_are_clipped_to_their_norm() -> None:
    context = replace(context_for_step(), grad_clip_thresh=1e-3)
    outcome = train_step(context, micro_batches(sequences(2), 2), 0)
    moments = torch.cat([state["exp_avg"].flatten() for state in context.optimizer.state.values()])
    assert float(outcome.grad_norm) > 1e-2 and float(moments.norm()) == pytest.approx((1 - 0.9) * 1e-3, rel=1e-3)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    context = context_for_step()
    batch = micro_batches(sequences(2), 2)
    train_step(context, batch, 0)
    before = values(context)

    norm = context.model.module.get_submodule("model.norm")
    poison = norm.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    outcome = train_step(context, batch, 1)
    poison.remove()
    assert bool(outcome.skipped) and not torch.isfinite(outcome.grad_norm)
    assert all(torch.equal(was, now) for was, now in zip(before, values(context), strict=True))

    assert not bool(train_step(context, batch, 2).skipped)
    assert not all(torch.equal(was, now) for was, now in zip(before, values(context), strict=True))


def test_float16_follows_float32_whatever_the_scale_of_the_loss() -> None:
    batch = micro_batches(sequences(4), 2)
    exact = context_for_step()
    expected = [train_step(exact, batch, step) for step in range(8)]
    for scale in (2.0**16, 2.0**10):
        context = context_for_step(torch.float16)
        assert context.scaler is not None
        context.scaler.load_state_dict({"scale": scale, "steps": 0})
        for step, wanted in enumerate(expected):
            outcome = train_step(context, batch, step)
            assert float(outcome.loss_sum) == pytest.approx(float(wanted.loss_sum), rel=2e-3)
            assert float(outcome.grad_norm) == pytest.approx(float(wanted.grad_norm), rel=1e-2)
        assert float(context.scaler.scale) == scale


def test_a_scale_too_large_is_halved_until_updates_are_made() -> None:
    batch = micro_batches(sequences(2), 2)
    context = context_for_step(torch.float16)
    assert context.scaler is not None
    context.scaler.load_state_dict({"scale": 2.0**24, "steps": 0})
    before = values(context)  # parameters only: there is no optimizer state yet
    outcomes = [train_step(context, batch, 0)]
    assert all(torch.equal(was, now) for was, now in zip(before, values(context), strict=False))
    while bool(outcomes[-1].skipped):
        assert bool(outcomes[-1].rescaled)
        outcomes.append(train_step(context, batch, 0))
    assert float(context.scaler.scale) == 2.0 ** (24 - len(outcomes) + 1)
    assert not all(torch.equal(was, now) for was, now in zip(before, values(context), strict=False))


def test_z_loss_is_minimised_and_reported_apart() -> None:
    plain, regularised = context_for_step(), context_for_step(loss=LossConfig(z_loss_weight=0.1))
    outcomes = [train_step(context, micro_batches(sequences(4), 2), 0) for context in (plain, regularised)]
    assert float(outcomes[1].loss_sum) == pytest.approx(float(outcomes[0].loss_sum), rel=1e-6)
    reports = []
    for context, outcome in zip((plain, regularised), outcomes, strict=True):
        context.collector.end_step(outcome)
        reports.append(context.collector.report(outcome)[0])
    assert reports[0]["z_loss"] == 0
    # An untrained model spreads its guesses evenly: ln(Z) is near ln(vocabulary).
    of_a_token = 0.1 * math.log(TINY_SHAPE.vocab_size) ** 2
    assert reports[1]["z_loss"] == pytest.approx(of_a_token, rel=0.05)
    assert float(outcomes[1].grad_norm) != pytest.approx(float(outcomes[0].grad_norm), rel=0.01)


def test_a_step_is_the_same_whether_documents_share_rows_or_not() -> None:
    rows = [[4, 3, 2], [9], [5, 4]]
    shared, lengths = pack(9, rows, vocab_size=TINY_SHAPE.vocab_size), [length for row in rows for length in row]
    alone = [pack(9, [[length] for length in half]) for half in (lengths[:3], lengths[3:])]
    pieces = [piece for number, row in enumerate(rows) for piece in shared.tokens_BT[number, : sum(row)].split(row)]
    for number, piece in enumerate(pieces):
        alone[number // 3].tokens_BT[number % 3, : len(piece)] = piece
    outcomes, weights, spans = [], [], []
    for micro_batches in ([shared, pack(9, [[], [], []])], alone):
        context = context_for_step()
        outcomes.append(train_step(context, StepBatch(0, 0, micro_batches), 0))
        weights.append(values(context))
        context.collector.end_step(outcomes[-1])
        spans.append(context.collector.report(outcomes[-1])[1])
    for outcome in outcomes:
        assert int(outcome.valid_tokens) == sum(length - 1 for length in lengths)
        assert float(outcome.loss_sum) == pytest.approx(float(outcomes[0].loss_sum), rel=1e-6)
        assert float(outcome.grad_norm) == pytest.approx(float(outcomes[0].grad_norm), rel=1e-5)
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    # The last token of a row is only a label: 4 + 3 + 1, 8, 5 + 3, and three rows of padding.
    assert spans[0] == pytest.approx((16 + 9 + 1 + 64 + 25 + 9 + 3 * 64) / 48)
