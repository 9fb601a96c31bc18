from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pretraining.config.plugins import SCHEDULES
from pretraining.config.read import load_train_config
from pretraining.durations import TokenSchedule
from pretraining.errors import ConfigError
from pretraining.optim.horizon import Horizon, describe_schedule
from pretraining.optim.optimizer import PEAK
from pretraining.optim.schedules import LearningRate, build_learning_rate


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (5, 5), (4, 5)])
def test_runs_without_room_for_a_decay_stay_at_the_peak(warmup_steps: int, total_steps: int) -> None:
    assert rate_of(f"num_steps={total_steps}", f"warmup_steps={warmup_steps}").at(warmup_steps, 1.0) == 1.0


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


def fails_late(step: int, peak: float, horizon: Horizon) -> float:
    return peak / (horizon.total_steps - 1 - step)


def test_a_schedule_of_the_users_own_that_gives_no_learning_rate_is_refused() -> None:
    for name in ("negative", "fails_late"):
        with pytest.raises(ConfigError):
            LearningRate(f"{__name__}:{name}", HORIZON)
    rate = LearningRate(f"{__name__}:not_a_number", HORIZON)
    assert rate.at(3, 2.0) == 2.0
    with pytest.raises(ConfigError):
        rate.at(4, 2.0)


def rate_of(*flags: str, tokens_per_step: int = 100, training_tokens: int | None = None) -> LearningRate:
    source = "use_dummy_dataset=true" if training_tokens is None else "data_path=made_up"
    config = load_train_config([source, *flags])
    token_schedule = TokenSchedule.steady(tokens_per_step)
    return build_learning_rate(config.schedule, config.run.num_steps, token_schedule, training_tokens)


def curve(*flags: str, steps: int = 101) -> list[float]:
    """Shares of the peak, by step."""
    rate = rate_of(*flags, f"num_steps={steps}")
    return [rate.at(step, 1.0) for step in range(steps)]


UP = pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
AFTER_FOUR = "warmup_steps=4"


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"piecewise_linear"}))
def test_each_schedule_warms_up_to_the_peak_and_ends_at_its_minimum(name: str) -> None:
    shares = curve(f"schedule={name}", AFTER_FOUR, "min_lr_ratio=0.25")
    assert shares[:5] == UP and max(shares) == 1.0
    assert shares[-1] == (1.0 if name == "constant" else pytest.approx(0.25))
    assert shares[4:] == sorted(shares[4:], reverse=True)


@pytest.mark.parametrize(
    ("flags", "quarter", "half"),
    [
        (("schedule=cosine",), 0.1 + 0.45 * (1 + 0.5**0.5), 0.55),
        (("schedule=linear",), 0.775, 0.55),
        (("schedule=polynomial",), 0.775, 0.55),
        (("schedule=polynomial", "decay_power=2"), 0.1 + 0.9 * 0.5625, 0.1 + 0.9 * 0.25),
    ],
)
def test_each_schedule_decays_by_its_formula(flags: tuple[str, ...], quarter: float, half: float) -> None:
    shares = curve(*flags, "warmup_steps=0", "min_lr_ratio=0.1")
    assert [shares[step] for step in (0, 25, 50, 100)] == pytest.approx([1.0, quarter, half, 0.1])


@pytest.mark.parametrize(
    ("flags", "after_a_quarter"),
    [
        *((("schedule=wsd", "decay_shape=linear"), 0.75), (("schedule=trapezoid",), 0.75)),
        *((("schedule=wsd", "decay_shape=cosine"), 0.5 + 0.125**0.5), (("schedule=wsd",), 0.5)),
    ],
)
def test_wsd_holds_the_peak_and_decays_by_its_shape(flags: tuple[str, ...], after_a_quarter: float) -> None:
    shares = curve(*flags, AFTER_FOUR, "decay_steps=40", "min_lr_ratio=0")
    assert shares[4:61] == [1.0] * 57 and shares[61] < 1.0
    assert shares[70] == pytest.approx(after_a_quarter) and shares[100] == 0.0


def test_a_longer_run_extends_the_stable_phase_and_keeps_the_decay() -> None:
    short, long = (curve("schedule=wsd", AFTER_FOUR, "decay_steps=40", steps=steps) for steps in (101, 201))
    assert short[-41:] == pytest.approx(long[-41:]) and long[4:161] == [1.0] * 157


def test_a_stable_phase_of_given_length_is_followed_by_the_decay() -> None:
    shares = curve("schedule=wsd", "decay_shape=cosine", AFTER_FOUR, "stable_steps=50", "min_lr_ratio=0")
    assert shares[4:54] == [1.0] * 50 and shares[54] < 1.0 and shares[-1] == pytest.approx(0.0)
    two_phases = curve("schedule=wsd", "decay_shape=cosine", AFTER_FOUR, "stable_steps=0", "min_lr_ratio=0")
    assert two_phases == curve("schedule=cosine", AFTER_FOUR, "min_lr_ratio=0")


def test_without_lengths_the_last_fifth_is_the_decay() -> None:
    shares = curve("schedule=wsd", AFTER_FOUR, steps=100)
    assert shares[79] == 1.0 > shares[80]


def test_lengths_may_be_shares_tokens_or_epochs() -> None:
    expected = rate_of("schedule=wsd", "num_steps=1000", "warmup_steps=50", "decay_steps=200").horizon
    assert rate_of("schedule=wsd", "num_steps=1000", "warmup_steps=5%", "decay_steps=20%").horizon == expected
    assert rate_of("schedule=wsd", "num_steps=1000", "warmup_steps=5ktok", "decay_steps=20ktok").horizon == expected
    epochs = ("schedule=wsd", "num_steps=2ep", "warmup_steps=0.1ep", "decay_steps=0.4ep")
    assert rate_of(*epochs, training_tokens=50_000).horizon == expected


def test_straight_lines_lead_through_the_points() -> None:
    shares = curve("schedule=piecewise_linear", "schedule_points=10:0.5,20:1,50%:1,90:0")
    assert shares[:11] == [0.5] * 11
    assert [shares[step] for step in (15, 20, 50, 70, 90, 100)] == pytest.approx([0.75, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_an_annealing_stage_decays_from_its_first_step_to_the_last() -> None:
    assert curve("training_stage=annealing", steps=11) == pytest.approx([1 - step / 10 for step in range(11)])
    config = load_train_config(["use_dummy_dataset=true", "training_stage=annealing", "num_steps=101"])
    steady = TokenSchedule.steady(100)
    rate = build_learning_rate(config.schedule, config.run.num_steps, steady, None, annealing_from=80)
    assert [rate.at(step, 2.0) for step in (80, 85, 90, 100)] == pytest.approx([2.0, 1.5, 1.0, 0.0])
    assert rate.state_dict() == {"annealing_from": 80} and rate_of().state_dict() == {}
    assert "80" in describe_schedule(config.schedule, rate.horizon)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("schedule=cosine", "decay_steps=5"), "decay_steps"),
        (("schedule=piecewise_linear",), "schedule_points"),
        (("schedule=piecewise_linear", "schedule_points=0:1", "warmup_steps=5"), "warmup_steps"),
        (("schedule=piecewise_linear", "schedule_points=0:1,5"), "schedule_points"),
        (("schedule=piecewise_linear", "schedule_points=0:1e400"), "schedule_points"),
        (("schedule=piecewise_linear", "schedule_points=x:1"), None),
        (("schedule=piecewise_linear", "schedule_points=0:0,60:1,50%:1"), "schedule_points"),
        (("schedule=wsd", "decay_steps=5", "stable_steps=5"), "stable_steps"),
        (("training_stage=annealing", "schedule=linear"), "schedule"),
        (("training_stage=annealing", "warmup_steps=5"), "warmup_steps"),
        # Parts longer than the run.
        (("schedule=wsd", "decay_steps=98", AFTER_FOUR), "decay_steps"),
        (("schedule=wsd", "stable_steps=97", AFTER_FOUR), "stable_steps"),
        (("schedule=wsd", "warmup_steps=101%"), "warmup_steps"),
        (("schedule=wsd", "decay_steps=1ep"), None),
    ],
)
def test_a_setting_that_a_schedule_cannot_use_is_refused(flags: tuple[str, ...], named: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        rate_of(*flags, "num_steps=100")
    assert named is None or named in raised.value.settings


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        (("training_stage=annealing",), ["0", "0", "100"]),
        (("schedule=cosine", AFTER_FOUR), ["100", "4", "0.1"]),
        (("schedule=trapezoid", AFTER_FOUR, "decay_steps=20"), ["100", "4", "20", "0.1"]),
        (("schedule=piecewise_linear", "schedule_points=0:0,50%:1"), ["0", "0", "1", "50"]),
        (("schedule=unit.optim.test_schedules:flat", AFTER_FOUR), ["100", "4"]),
    ],
)
def test_a_schedule_is_described_in_one_line(flags: tuple[str, ...], numbers: list[str]) -> None:
    config = load_train_config(["use_dummy_dataset=true", "num_steps=100", *flags])
    line = describe_schedule(config.schedule, rate_of("num_steps=100", *flags).horizon)
    assert re.findall(r"[\d.]*\d", line) == numbers


def flat(step: int, peak: float, horizon: Horizon) -> float:
    return peak
