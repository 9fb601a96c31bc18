from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.evaluation.held_out import Evaluator
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Duration, Interval, Progress, TrainState

pytestmark = pytest.mark.usefixtures("single_process")


class LossIsInput(nn.Module):
    """The loss of a position is its input token; positions with ignored labels do not count. There is z-loss, too."""

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        positions_BS: torch.Tensor | None,
        document_lengths: tuple[int, ...] | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        valid = labels_BS != -100
        z_loss_sum = 0.25 * valid.sum()
        return (tokens_BS * valid).sum() + z_loss_sum, valid.sum(), z_loss_sum


def observer_of(report: Callable[[Progress, float], None]) -> Any:
    return SimpleNamespace(after_evaluation=report)


def evaluator_with(
    opened: list[int],
    reports: list[tuple[int, float]],
    every: int = 3,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluator:
    first = MicroBatch(torch.tensor([[1, 1, 1], [1, 1, 1]], dtype=torch.int32))
    second = MicroBatch(torch.tensor([[7, 7, 7], [9, 9, 9]], dtype=torch.int32), lengths_B=torch.tensor([3, 0]))

    @contextmanager
    def open_batches() -> Iterator[list[StepBatch]]:
        opened.append(1)
        yield [StepBatch(0, 0, [first]), StepBatch(1, 2, [second])]

    return Evaluator(
        model=LossIsInput(),
        open_batches=open_batches,
        device=torch.device("cpu"),
        interval=Interval(Duration(every, "steps"), None),
        stopwatch=Stopwatch(),
        observer=observer_of(lambda progress, loss: reports.append((progress.steps, loss))),
        should_stop=should_stop,
    )


def test_the_loss_is_the_mean_over_valid_tokens_of_all_batches() -> None:
    reports: list[tuple[int, float]] = []
    state = TrainState(total_steps=1, stop_step=1, tokens_per_step=1, progress=Progress(0, 0))
    state.advance(0.0)
    loss = evaluator_with([], reports).maybe_run(state)
    assert loss == pytest.approx((4 * 1 + 2 * 7) / 6)
    assert reports == [(1, loss)]


def test_evaluations_come_on_the_interval_and_at_the_end_of_the_run() -> None:
    reports: list[tuple[int, float]] = []
    opened: list[int] = []
    evaluator = evaluator_with(opened, reports)
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(0, 0))
    while not state.stopping:
        state.advance(0.0)
        evaluator.maybe_run(state)
    assert [step for step, _ in reports] == [3, 6, 8] and len(opened) == 3


def test_without_held_out_documents_there_is_no_evaluation() -> None:
    evaluator = Evaluator(
        model=LossIsInput(),
        open_batches=None,
        device=torch.device("cpu"),
        interval=Interval(Duration(1, "steps"), None),
        stopwatch=Stopwatch(),
        observer=observer_of(lambda progress, loss: pytest.fail("reported")),
        should_stop=lambda: False,
    )
    state = TrainState(total_steps=1, stop_step=1, tokens_per_step=1, progress=Progress(0, 0))
    state.advance(0.0)
    assert evaluator.maybe_run(state) is None


def test_an_evaluation_that_is_broken_off_is_owed_and_paid_once_by_the_next_start() -> None:
    reports: list[tuple[int, float]] = []
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(2, 2))
    state.advance(0.0)
    answers = iter([False, True])
    told = evaluator_with([], reports, should_stop=lambda: next(answers))
    assert told.maybe_run(state) is None and told.pending and reports == []

    resumed = evaluator_with([], reports)
    resumed.load_state_dict(told.state_dict())
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(3, 3))
    loss = resumed.maybe_run(state)
    assert loss == pytest.approx(3.0) and reports == [(3, loss)]
    assert not resumed.pending and resumed.maybe_run(state) is None


def test_a_run_that_is_should_stop_does_not_begin_an_evaluation() -> None:
    opened: list[int] = []
    evaluator = evaluator_with(opened, [])
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(1, 1))
    state.advance(0.0, stop=15)
    assert evaluator.maybe_run(state) is None
    was_pending = evaluator.pending
    assert not was_pending  # nothing was due
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(2, 2))
    state.advance(0.0, stop=15)
    assert evaluator.maybe_run(state) is None and evaluator.pending and opened == []
