"""Durations: their texts, their lengths in steps, and when an interval is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.durations import LARGEST_AMOUNT, Duration, TokenSchedule, parse_number, resolve_warmup_steps
from pretraining.errors import ConfigError
from pretraining.progress import Interval, Progress, TrainState

durations = st.one_of(
    st.builds(Duration, st.integers(0, LARGEST_AMOUNT), st.sampled_from(["steps", "tokens"])),
    st.builds(Duration, st.floats(0, 1e18) | st.integers(0, 10**9), st.sampled_from(["epochs", "seconds", "percent"])),
)


# Spellings of an amount, by unit.
WRITTEN: dict[str, dict[float, str]] = {
    "steps": {1000: "1000|1_000|1e3|1000.0|1000 steps", 10_000: "10k steps", 1_500_000: "1.5Msteps", 0: "0"},
    "tokens": {
        5e6: "5_000_000tok",
        5e9: "5Btok|5B tokens",
        1e8: "0.1Btok",
        2e12: "2Ttok",
        3000: "3ktok|3Ktok",
        7: "7Tok",
    },
    "epochs": {2: "2ep", 0.5: "0.5 epochs|.5ep"},
    "seconds": {90: "90s", 1800: "30min|30MIN", 5400: "1.5h", 7200: " 2h ", 84_600: "23h30min", 3661.5: "1h 1min 1.5s"},
    "percent": {2.5: "2.5%", 10: "10 %"},
}
SHORTEST = "1000|5Btok|1500ktok|0tok|7tok|2ep|0.1ep|90s|30min|2h|23h30min|0s"
NO_DURATIONS = "|tok|five|5m|5xyz|5Mx|-5|1.5|0.5tok|1e-3|nan|inf|1e999999999|1e19|1 2|1h2|1ep30min|1k2tok|1h2min3s4s|٣"
BARE = "20B|1.5M|10k|3 K|2T"


@pytest.mark.parametrize("unit", WRITTEN)
def test_a_duration_is_written_in_these_ways(unit: str) -> None:
    for amount, texts in WRITTEN[unit].items():
        for text in texts.split("|"):
            assert Duration.parse(text) == Duration(amount, unit), text
    assert Duration.parse(1000) == Duration(1000, "steps")


@pytest.mark.parametrize("text", [*NO_DURATIONS.split("|"), *BARE.split("|"), "5 minutos"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Duration.parse(text)


def test_an_impossible_duration_cannot_be_made() -> None:
    impossible: list[tuple[float, Any]] = [(1, "days"), (-1, "steps"), (math.nan, "epochs"), (math.inf, "seconds")]
    for amount, unit in [*impossible, (10**400, "tokens"), (1.5, "steps")]:
        with pytest.raises(ConfigError):
            Duration(amount, unit)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: Duration(2, "epochs").to_steps(TokenSchedule.steady(7), None),
        lambda: Duration(1800, "seconds").to_steps(TokenSchedule.steady(7), 50),
        lambda: is_due(Duration(1, "epochs"), progress(0), progress(1), None),
        lambda: resolve_warmup_steps(Duration.parse("1Mtok"), Duration(600, "steps"), TokenSchedule.steady(1000), None),
    ],
    ids=["endless data", "a time", "an interval of endless data", "a warmup longer than the run"],
)
def test_a_duration_without_a_number_of_steps_is_refused(ask: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        ask()


@given(durations)
def test_the_canonical_text_is_the_shortest_and_reads_back_equal(duration: Duration) -> None:
    assert Duration.parse(str(duration)) == duration
    for text in SHORTEST.split("|"):
        assert str(Duration.parse(text)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_exactly_as_written(number: float) -> None:
    assert parse_number(repr(number)) == Fraction(repr(number))


def test_a_length_is_rounded_up_to_whole_steps() -> None:
    lengths = [Duration(100, "steps"), Duration(100, "tokens"), Duration(98, "tokens"), Duration(2, "epochs")]
    assert [length.to_steps(TokenSchedule.steady(7), 50) for length in lengths] == [100, 15, 14, 15]
    # As a binary fraction 0.1 is a little more than a tenth, which would round up to 2 steps.
    assert Duration(0.1, "epochs").to_steps(TokenSchedule.steady(100), 1000) == 1


def progress(step: int, tokens_per_step: int = 10) -> Progress:
    return Progress(step, step * tokens_per_step, step * 0.7)


def is_due(every: Duration, before: Progress, after: Progress, training_tokens: int | None) -> bool:
    state = TrainState(10**6, 10**6, 10, before)
    state.progress = after
    return Interval(every, training_tokens).is_due(state)


@given(durations.filter(lambda every: every.amount > 1e-6), st.integers(1, 30), st.integers(0, 60))
def test_an_interval_never_drifts(every: Duration, stride: int, steps: int) -> None:
    """However often it is checked, an interval is due once per boundary, at most once per check."""
    training_tokens = 55
    walk = [progress(step) for step in range(0, steps + 1, stride)]
    fired = [is_due(every, before, after, training_tokens) for before, after in pairwise(walk)]
    each_step = [is_due(every, progress(step), progress(step + 1), training_tokens) for step in range(walk[-1].steps)]
    assert fired == [any(each_step[start : start + stride]) for start in range(0, walk[-1].steps, stride)]


@pytest.mark.parametrize(
    ("every", "due_after"),
    [
        ("3", [3, 6, 9]),
        ("25tok", [3, 5, 8, 10]),
        ("0.5ep", [2, 4, 6, 8, 10]),  # of 40 tokens
        ("2s", [3, 6, 9]),  # 0.7 seconds per step
        ("1tok", list(range(1, 11))),
        ("0", []),
        ("0s", []),
        ("0ep", []),
    ],
)
def test_an_interval_fires_when_a_multiple_is_crossed(every: str, due_after: list[int]) -> None:
    interval = Duration.parse(every)
    assert [step + 1 for step in range(10) if is_due(interval, progress(step), progress(step + 1), 40)] == due_after
    assert not is_due(Duration(1, "epochs"), progress(0), progress(1), 0)  # of an empty dataset


@pytest.mark.parametrize(
    ("warmup", "length", "steps"),
    [
        (None, "600", 30),
        (None, "60ktok", 30),
        (None, "10", 0),
        (None, "1_000_000", 2000),
        ("50", "600", 50),
        ("1ktok", "600", 10),
        ("0.1ep", "600", 5),
        ("10%", "600", 60),
    ],
)
def test_warmup_is_a_part_of_the_run_and_by_default_a_twentieth(warmup: str | None, length: str, steps: int) -> None:
    given = None if warmup is None else Duration.parse(warmup)
    assert resolve_warmup_steps(given, Duration.parse(length), TokenSchedule.steady(100), 5000) == steps


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(0, 300))
def test_steps_are_the_fewest_that_reach_the_tokens_in_any_phases(wanted: list[tuple[int, int]], tokens: int) -> None:
    segments, step, seen = [], 0, 0
    for steps, tokens_per_step in wanted:
        segments.append((step, seen, tokens_per_step))
        step, seen = step + steps, seen + steps * tokens_per_step
    token_schedule = TokenSchedule(tuple(segments))
    per_step = [tokens_per_step for steps, tokens_per_step in wanted for _ in range(steps)]
    per_step += [wanted[-1][1]] * 400
    reached = list(accumulate(per_step, initial=0))
    assert [token_schedule.tokens_at(number) for number in range(len(reached))] == reached
    assert Duration(tokens, "tokens").to_steps(token_schedule, None) == next(
        n for n, seen in enumerate(reached) if seen >= tokens
    )


def test_a_batch_that_changes_leaves_the_warmup_where_it_was() -> None:
    before, after = TokenSchedule.steady(10), TokenSchedule(((0, 0, 10), (400, 4000, 5)))
    for warmup in (None, Duration(500, "tokens"), Duration(50, "steps"), Duration(0.05, "epochs")):
        assert resolve_warmup_steps(warmup, Duration(10_000, "tokens"), before, 10_000) == 50
        assert resolve_warmup_steps(warmup, Duration(10_000, "tokens"), after, 10_000) == 50


def test_an_invocation_may_stop_before_the_run_is_finished_and_keeps_the_first_reason() -> None:
    state = TrainState(total_steps=5, stop_step=2, tokens_per_step=10, progress=Progress(0, 0))
    stops = []
    for seconds in (1.5, 2.5):
        stops.append(state.stopping)
        state.advance(seconds)
    assert (state.before, state.progress) == (Progress(1, 10, 1.5), Progress(2, 20, 2.5))
    assert [*stops, state.stopping] == [False, False, True] and not state.preempted
    assert not state.finished and TrainState(5, 5, 10, Progress(5, 50)).finished
    told = TrainState(total_steps=5, stop_step=5, tokens_per_step=10, progress=Progress(0, 0))
    for stop in (0, 15, 10, 0):
        told.request_stop(stop)
    assert told.preempted and told.stopping and not told.finished and told.stop == 15
