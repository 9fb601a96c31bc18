from __future__ import annotations

import json
import math

import pytest

from pretraining.best import Best, Measure
from pretraining.progress import Progress, TrainState

LOSS = Measure("loss", "evaluation_loss", "web")


def ends_after(best: Best, values: list[float]) -> int | None:
    """Return after how many evaluations the run stops; None = never."""
    run = TrainState(total_steps=100, stop_step=100, tokens_per_step=1, progress=Progress(10, 10))
    for number, value in enumerate(values, start=1):
        best.record(value, number)
        best.stop_if_due(run)
        if run.early_end:
            wanted = "finite loss" if best.best is None else f"better loss than {best.best:.4f}"
            assert run.finished and run.stopping and run.early_end.startswith(f"no {wanted} in ")
            return number
    return None


@pytest.mark.parametrize(
    ("limit", "values", "ends"),
    [
        (0, [1.0] * 50, None),
        (1, [3.0, 2.0, 2.0], 3),
        (2, [3.0, 4.0, 2.9, 3.0, 2.8, 5.0, 2.8], 7),
        (2, [3.0, math.nan, math.inf], 3),
        (2, [math.nan, math.nan], 2),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_run_stops_after_evaluations_without_a_better_value_also_if_it_is_resumed(
    limit: int, values: list[float], ends: int | None, sign: int
) -> None:
    measure = LOSS._replace(larger_is_better=sign < 0)
    values = [sign * value for value in values]
    assert ends_after(Best(measure, limit), values) == ends
    for stop in range(ends or 9):
        before, after = Best(measure, limit), Best(measure, limit)
        assert ends_after(before, values[:stop]) is None
        if state := before.state_dict():
            after.load_state_dict(json.loads(json.dumps(state)))
        assert ends_after(after, values[stop:]) == (ends and ends - stop)


def test_the_best_is_the_first_with_the_best_value_and_found_in_this_invocation() -> None:
    best = Best(LOSS, limit=9)
    found = []
    for step, value in enumerate([3.0, math.nan, 2.0, 2.0, 2.5]):
        best.record(value, step)
        found.append(best.is_best_at(step))
    assert found == [True, False, True, False, False]
    assert (best.value, best.step, best.best, best.in_a_row) == (2.5, 4, 2.0, 2)
    resumed = Best(LOSS, limit=9)
    resumed.load_state_dict(best.state_dict())
    assert (resumed.value, resumed.step, resumed.best, resumed.in_a_row) == (2.5, 4, 2.0, 2)
    assert not any(resumed.is_best_at(step) for step in range(5))


def test_a_limit_that_is_given_later_counts_from_then_on() -> None:
    before, after = Best(LOSS), Best(LOSS, limit=2)
    assert ends_after(before, [1.0, 2.0, 2.0, 2.0]) is None
    after.load_state_dict(before.state_dict())
    assert ends_after(after, [2.0, 2.0]) == 2


@pytest.mark.parametrize("changed", [{"definition": "books"}, {"name": "hellaswag/acc"}])
def test_another_measure_begins_again_with_a_line_and_a_run_without_it_keeps_the_state(
    changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before = Best(LOSS, 2)
    ends_after(before, [1.0, 2.0])
    after = Best(LOSS._replace(**changed), 2)  # type: ignore[arg-type]
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == {} and "the best loss so far, 1.0000, is of other evaluation data" in caplog.text
    without = Best(LOSS._replace(definition=None))
    without.load_state_dict(before.state_dict())
    assert without.state_dict() == before.state_dict()
