from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.train.stability import SpikeDetector

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("single_process")


def detector(window: int = 8, threshold: float = 6.0, **conditions: int) -> SpikeDetector:
    return SpikeDetector(threshold, window, CPU, conditions)


def feed(spikes: SpikeDetector, losses: list[float], broken: tuple[int, ...] = ()) -> list[bool]:
    """Judge losses one after the other; the updates at `broken` are skipped for another reason."""
    found = []
    for index, loss in enumerate(losses):
        verdict = spikes.judge(torch.tensor(loss * 10), torch.tensor(10))
        skipped = verdict.is_spike | torch.tensor(index in broken)
        spikes.remember(verdict.loss, skipped)
        found.append(bool(verdict.is_spike))
    return found


USUAL = [3.0, 3.1, 2.9, 3.0, 3.05, 2.95, 3.0, 3.1]


def test_a_loss_that_is_not_finite_is_no_spike_and_leaves_no_trace() -> None:
    spikes = detector()
    assert feed(spikes, [*USUAL, math.nan, math.nan, 3.0], broken=(8, 9)) == [False] * 11
    assert feed(spikes, [30.0]) == [True]


@given(st.lists(st.floats(0.5, 12.0, width=32), min_size=9, max_size=40), st.integers(4, 12), st.floats(1.0, 8.0))
def test_the_threshold_is_in_standard_deviations_of_the_last_losses_that_counted(
    losses: list[float], window: int, threshold: float
) -> None:
    spikes, kept = detector(window, threshold), list[float]()
    for loss in losses:
        (found,) = feed(spikes, [loss])
        last = kept[-window:]
        if len(last) >= window // 2:
            excess = loss - statistics.fmean(last) - threshold * statistics.stdev(last)
            if abs(excess) > 1e-3:  # closer to the threshold, rounding decides
                assert found == (excess > 0)
        else:
            assert not found
        if not found:
            kept.append(loss)


def test_a_shorter_window_takes_the_newest_losses_and_a_longer_one_all() -> None:
    state = {"losses": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "conditions": {}}
    for window, kept in ((4, [3.0, 4.0, 5.0, 6.0]), (12, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])):
        spikes = detector(window)
        spikes.load_state_dict(state)
        assert spikes.state_dict()["losses"] == kept


def test_a_window_of_other_conditions_is_dropped() -> None:
    spikes = detector(phases=2)
    spikes.load_state_dict({"losses": USUAL, "conditions": {"phases": 1}})
    assert spikes.state_dict()["losses"] == []
