from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretraining.config.training import GuardConfig
from pretraining.distributed.processes import Activity
from pretraining.errors import DivergenceError
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import SpikeVerdict, StepOutcome
from pretraining.progress import Progress, TrainState
from pretraining.train.stability import Guards


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


def test_at_the_end_of_the_invocation_the_last_step_counts() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=2), steps=2)
    watched.step(True)
    with pytest.raises(DivergenceError, match="step 2"):
        watched.step(True)


def test_a_divergence_that_ends_one_step_before_the_end_is_not_forgotten_by_the_last_step() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=2), steps=3)
    watched.step(True)
    watched.step(True)
    with pytest.raises(DivergenceError, match="step 2") as ending:
        watched.step(False)
    assert (ending.value.first_step, ending.value.last_step, ending.value.samples) == (1, 2, (0, 8))


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


def test_a_limit_below_the_restored_count_applies_from_the_next_step() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=3))
    watched.guards.load_state_dict({"skipped_in_a_row": 10})
    watched.guards.check_restored(watched.state)  # without rollbacks, a start with other settings may resume
    watched.step(False)
    watched.step(False)
    assert watched.guards.state_dict() == {"skipped_in_a_row": 0}


def test_a_restored_count_at_its_limit_is_a_divergence_at_once_if_the_run_goes_back() -> None:
    watched = Watched(GuardConfig(max_skipped_steps=3, max_rollbacks=1))
    watched.guards.load_state_dict({"skipped_in_a_row": 3})
    for _ in range(5):
        watched.state.advance(0.0)
    with pytest.raises(DivergenceError, match="step 5") as ending:
        watched.guards.check_restored(watched.state)
    assert (ending.value.first_step, ending.value.samples) == (3, (8, 20))
    watched.guards.load_state_dict({"skipped_in_a_row": 2})
    watched.guards.check_restored(watched.state)
