from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pretraining.errors import ConfigError
from pretraining.optim.optimizer import PEAK
from pretraining.optim.schedules import Horizon, LearningRate, cosine


def schedule_of(peak: float, horizon: Horizon) -> Callable[[int], float]:
    return lambda step: cosine(step, peak, horizon)


def test_warm_up_rises_by_equal_steps_to_the_peak() -> None:
    schedule = schedule_of(1.0, Horizon(warmup_steps=4, total_steps=100, min_lr_ratio=0.1))
    assert [schedule(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_half_a_cosine_that_ends_at_the_smallest_rate_on_the_last_step() -> None:
    schedule = schedule_of(2.0, Horizon(warmup_steps=0, total_steps=101, min_lr_ratio=0.1))
    assert schedule(0) == 2.0
    assert schedule(50) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert schedule(100) == pytest.approx(0.2)
    rates = [schedule(step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)


def test_the_rate_stays_at_the_smallest_after_the_end() -> None:
    schedule = schedule_of(1.0, Horizon(warmup_steps=2, total_steps=10, min_lr_ratio=0.25))
    assert schedule(9) == schedule(1000) == pytest.approx(0.25)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (5, 5), (4, 5)])
def test_runs_without_room_for_a_decay_stay_at_the_peak(warmup_steps: int, total_steps: int) -> None:
    schedule = schedule_of(1.0, Horizon(warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=0.0))
    assert schedule(warmup_steps) == 1.0


HORIZON = Horizon(warmup_steps=1, total_steps=10, min_lr_ratio=0.1)


def test_every_group_follows_the_schedule_from_its_own_peak() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], PEAK: peak} for peak in (1e-2, 1.0)]
    optimizer = torch.optim.SGD(groups, lr=0.0)
    assert LearningRate("cosine", HORIZON).apply(optimizer, 0) == 5e-3
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 0.5]


def negative(step: int, peak: float, horizon: Horizon) -> float:
    return peak if step < 5 else -1.0


def not_a_number(step: int, peak: float, horizon: Horizon) -> float:
    return float("nan") if step == 4 else peak


def test_a_schedule_of_the_users_own_that_gives_no_learning_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule=unit.optim.test_schedules:negative gives -1.0 for step 9"):
        LearningRate("unit.optim.test_schedules:negative", HORIZON)
    rate = LearningRate("unit.optim.test_schedules:not_a_number", HORIZON)
    assert rate.at(3, 2.0) == 2.0
    with pytest.raises(ConfigError, match="gives nan for step 4"):
        rate.at(4, 2.0)
