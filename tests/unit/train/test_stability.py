"""Guards: too many skipped updates in a row stop a run, and a finite spike of the loss is found."""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.training import GuardConfig
from pretraining.distributed.processes import Activity
from pretraining.errors import DivergenceError
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import SpikeVerdict, StepOutcome
from pretraining.progress import Progress, TrainState
from pretraining.train.stability import Guards, SpikeDetector


@dataclass
class Watched:
    """Guards with the run that they check."""

    config: GuardConfig
    steps: int = 100

    def __post_init__(self) -> None:
        self.state = TrainState(self.steps, self.steps, 10, Progress(0, 0))
        replicas: Any = None
        mixture = SimpleNamespace(first_sample=lambda step: 4 * step)
        loader: Any = SimpleNamespace(reader=SimpleNamespace(mixture=mixture))
        self.guards = Guards(self.config, loader, replicas, Activity(), None, Events())

    def step(self, skipped: bool, verdict: SpikeVerdict | None = None, rescaled: bool | None = None) -> None:
        self.state.advance(0.0)
        scalar = torch.tensor(1.0)
        down = None if rescaled is None else torch.tensor(rescaled)
        self.guards.after_step(
            self.state,
            StepOutcome(scalar, torch.tensor(1), scalar, torch.tensor(skipped), 0.1, verdict, down),
        )


def verdict(is_spike: bool, loss: float) -> SpikeVerdict:
    return SpikeVerdict(torch.tensor(is_spike), torch.tensor(loss), torch.tensor(2.5), torch.tensor(0.25))


def test_too_many_skipped_updates_in_a_row_stop_the_run_one_step_later() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=3))
    for skipped in (True, True, False, True, True, True):
        watched.step(skipped)
    with pytest.raises(DivergenceError, match="step 6") as ending:
        watched.step(False)  # the host reads the outcome of the step before
    assert (ending.value.first_step, ending.value.last_step, ending.value.samples) == (4, 6, (12, 24))
    assert "--skip_samples=12-23" in str(ending.value)


def test_updates_skipped_to_lower_the_loss_scale_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    watched = Watched(GuardConfig(max_skipped_steps=3))
    for _ in range(16):
        watched.step(skipped=True, rescaled=True)
    assert caplog.messages == []
    for _ in range(3):
        watched.step(skipped=True, rescaled=False)
    with pytest.raises(DivergenceError, match="since step 17 "):
        watched.step(skipped=False, rescaled=False)


def test_a_divergence_that_ends_one_step_before_the_end_is_not_forgotten_by_the_last_step() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=2), steps=3)
    watched.step(True)
    watched.step(True)
    with pytest.raises(DivergenceError, match="step 2") as ending:
        watched.step(False)
    assert (ending.value.first_step, ending.value.last_step, ending.value.samples) == (1, 2, (0, 8))
    watched = Watched(GuardConfig(max_skipped_steps=2), steps=2)
    watched.step(True)
    with pytest.raises(DivergenceError, match="step 2"):  # the last step counts at once
        watched.step(True)


def test_asking_for_the_state_does_not_change_when_the_run_ends() -> None:
    """Only some ranks describe a checkpoint; all must stop at the same step."""
    asked, unasked = (Watched(GuardConfig(max_skipped_steps=2)) for _ in range(2))
    for watched in (asked, unasked):
        watched.step(True)
        watched.step(True)
    asked.guards.state_dict()
    for watched in (asked, unasked):
        with pytest.raises(DivergenceError, match="step 2"):
            watched.step(True)


def test_a_restored_count_at_its_limit_is_a_divergence_at_once_if_the_run_goes_back() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=3, max_rollbacks=1))
    for _ in range(5):
        watched.state.advance(0.0)
    watched.guards.load_state_dict({"skipped_in_a_row": 2})
    watched.guards.check_restored(watched.state)
    watched.guards.load_state_dict({"skipped_in_a_row": 3})
    with pytest.raises(DivergenceError, match="step 5") as ending:
        watched.guards.check_restored(watched.state)
    assert (ending.value.first_step, ending.value.samples) == (3, (8, 20))


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
