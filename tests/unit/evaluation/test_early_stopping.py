from __future__ import annotations

import json
import math

import pytest

from pretraining.evaluation.held_out import EarlyStopping
from pretraining.progress import Progress, TrainState


def state() -> TrainState:
    return TrainState(total_steps=100, stop_step=100, tokens_per_step=1, progress=Progress(10, 10))


def ends_after(stopping: EarlyStopping, losses: list[float]) -> int | None:
    """Return after how many evaluations the run stops; None = never."""
    run = state()
    for number, loss in enumerate(losses, start=1):
        stopping.count_evaluation(loss, run)
        if run.early_end:
            assert run.finished and run.stopping
            return number
    return None


@pytest.mark.parametrize(
    ("limit", "losses", "ends"),
    [
        (0, [1.0] * 50, None),
        (1, [3.0, 2.0, 2.0], 3),
        (2, [3.0, 4.0, 2.9, 3.0, 2.8, 5.0, 2.8], 7),
        (2, [3.0, math.nan, math.inf], 3),
        (2, [math.nan, math.nan], 2),
    ],
)
def test_a_run_stops_after_evaluations_without_a_lower_loss(limit: int, losses: list[float], ends: int | None) -> None:
    assert ends_after(EarlyStopping(limit), losses) == ends


@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_continues_to_count(stop: int) -> None:
    losses = [3.0, 4.0, 2.9, 3.0, 3.1]
    before, after = EarlyStopping(2, "web"), EarlyStopping(2, "web")
    assert ends_after(before, losses[:stop]) is None
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert ends_after(after, losses[stop:]) == 5 - stop


def test_counting_begins_again_where_other_sets_decide_and_after_a_version_that_did_not_count() -> None:
    before = EarlyStopping(2, "web", 1.0, 1).state_dict()
    earlier = {name: value for name, value in before.items() if name != "definition"}
    for kept in (before | {"definition": "books"}, {"owed": False}, earlier | {"decided_by": ["web"]}):
        after = EarlyStopping(2, "web")
        after.load_state_dict(kept)
        assert after == EarlyStopping(2, "web")


def test_without_a_limit_the_state_has_the_fields_of_earlier_versions() -> None:
    assert EarlyStopping(0, "web", 1.0, 3).state_dict() == {}
