from __future__ import annotations

import pytest

from pretraining.optim.schedules import WarmupCosine


def test_warm_up_rises_by_equal_steps_to_the_peak() -> None:
    schedule = WarmupCosine(peak=1.0, warmup_steps=4, total_steps=100, min_lr_ratio=0.1)
    assert [schedule.at(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_half_a_cosine_that_ends_at_the_smallest_rate_on_the_last_step() -> None:
    schedule = WarmupCosine(peak=2.0, warmup_steps=0, total_steps=101, min_lr_ratio=0.1)
    assert schedule.at(0) == 2.0
    assert schedule.at(50) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert schedule.at(100) == pytest.approx(0.2)
    rates = [schedule.at(step) for step in range(101)]
    assert rates == sorted(rates, reverse=True)


def test_the_rate_stays_at_the_smallest_after_the_end() -> None:
    schedule = WarmupCosine(peak=1.0, warmup_steps=2, total_steps=10, min_lr_ratio=0.25)
    assert schedule.at(9) == schedule.at(1000) == pytest.approx(0.25)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (5, 5), (4, 5)])
def test_runs_without_room_for_a_decay_stay_at_the_peak(warmup_steps: int, total_steps: int) -> None:
    schedule = WarmupCosine(peak=1.0, warmup_steps=warmup_steps, total_steps=total_steps, min_lr_ratio=0.0)
    assert schedule.at(warmup_steps) == 1.0
