from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pretraining.config.training import IGNORED_LABEL, DataConfig, ModelConfig, TrainConfig
from pretraining.config.variants import resolve_shape
from pretraining.data.batch import MicroBatch
from pretraining.distributed.processes import Activity
from pretraining.durations import Duration
from pretraining.model.loss import HeadLoss
from pretraining.observability import throughput
from pretraining.observability.collector import Collector
from pretraining.observability.display import Display, Report
from pretraining.observability.events import Events
from pretraining.observability.metrics import Counts, Metrics, MetricsHook, PredictedTokens
from pretraining.observability.observer import Observer
from pretraining.observability.report_file import Sink
from pretraining.observability.step_outcome import StepOutcome
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch, Throughput
from pretraining.observability.trackers import Trackers
from pretraining.progress import Interval, Progress, TrainState

SHAPE = resolve_shape(ModelConfig(model_variant="tiny"))
KEPT = ("loss", "z_loss", "skipped_updates", "token_accuracy")
pytestmark = pytest.mark.usefixtures("single_process")


@dataclass
class Recorder(Display):
    """A display, a tracker and a clock that record their calls."""

    reports: list[dict[str, Any]] = field(default_factory=list)
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    observer: Observer = field(init=False)
    closed: int = 0
    now: float = 0.0

    def __enter__(self) -> Recorder:
        assert self.closed == 0
        return self

    def __exit__(self, *arguments: object) -> None:
        self.closed += 1

    def show(self, step: int, report: Report) -> None:
        self.reports.append({"step": step, **report})

    def log(self, step: int, values: dict[str, Any]) -> None:
        self.logged.append((step, values))

    def close(self) -> None:
        self.closed += 1


# Ten labels: 4 of web, of which the model predicts 3, and 6 of code, of which it predicts 2.
LABELS = torch.tensor([[1, 1, 1, 1, IGNORED_LABEL, IGNORED_LABEL], [1] * 6])
HITS = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
ROWS = MicroBatch(torch.zeros(2, 7, dtype=torch.int32), datasets_B=torch.tensor([0, 1]))


class Mine:
    """A score with a total of 1 in the first row and 2 in the second."""

    def sum(self, tokens: PredictedTokens) -> torch.Tensor:
        found = torch.zeros_like(tokens.losses_BS)
        found[:, 0] = torch.arange(1, len(found) + 1)
        return found

    def value(self, total: float, counts: Counts) -> float:
        return total


def observe(
    losses: list[float],
    *,
    every: int,
    skipped: tuple[int, ...] = (),
    spans: tuple[float, ...] = (10.0,),
    done: int = 0,
    kept: dict[str, Any] | None = None,
    custom: bool = False,
    scores: Sequence[str] = (),
    evaluation_seconds: float = 0.0,
) -> Recorder:
    """Observe steps of 10 tokens and 2 seconds with the given mean losses, after earlier steps."""
    recorder = Recorder()
    steps = done + len(losses)
    state = TrainState(steps, steps, 10, Progress(done, 10 * done))
    matrix, gain = torch.nn.Parameter(torch.full((3, 3), 1.0)), torch.nn.Parameter(torch.full((16,), 1.0))
    optimizer = torch.optim.SGD([{"params": [matrix], "lr": 0.1}, {"params": [gain], "lr": 0.02}])
    hook = (
        MetricsHook(lambda outputs, inputs: {"mine": (outputs.losses[0, 0] * 2, torch.tensor(4))}) if custom else None
    )
    assert dist.group.WORLD is not None
    metrics = Metrics(scores, hook, torch.nn.Identity())
    collector = Collector(metrics, ["web", "code"], optimizer, dist.group.WORLD)
    cpu, config = torch.device("cpu"), TrainConfig(data=DataConfig(seq_length=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "peak_tflops", lambda name: 20.0)
        rates = Throughput(config, SHAPE, cpu, Stopwatch(lambda: recorder.now), state.progress)
    observer = Observer(
        interval=Interval(Duration(every, "steps"), None),
        collector=collector,
        throughput=rates,
        display=recorder,
        stragglers=StragglerWatch(config.guard.straggler_factor, Activity()),
        trackers=Trackers({"recorder": Sink("recorder", lambda *report: recorder.log(*report[:2]), recorder.close)}),
        events=Events(),
    )
    recorder.observer = observer
    if kept:
        collector.load_state_dict(kept)
    with observer:
        for index, loss in enumerate(losses):
            with observer.stopwatch.measure("evaluation"):
                recorder.now += evaluation_seconds
            recorder.now += 2.0
            state.advance(recorder.now)
            tokens_BS2 = torch.stack((torch.full((2, 6), loss).where(LABELS != IGNORED_LABEL, 0), HITS), 2)
            z_loss_sum = torch.tensor(loss * 0.1)
            outputs = HeadLoss(torch.tensor(loss * 10) + z_loss_sum, torch.tensor(10), z_loss_sum, tokens_BS2)
            inputs: Any = SimpleNamespace(labels_BS=LABELS, attention_span=spans[index % len(spans)])
            collector.add(outputs, inputs, ROWS)
            outcome = StepOutcome(
                loss_sum=torch.tensor(loss * 10),
                valid_tokens=torch.tensor(10),
                grad_norm=torch.tensor(0.5),
                skipped=torch.tensor(index in skipped),
                learning_rate=0.1,
            )
            observer.after_step(state, outcome)
    return recorder


def test_a_report_is_the_mean_over_its_interval_and_the_last_step_is_always_reported() -> None:
    recorder = observe([1.0, 3.0, 5.0, 5.0, 8.0], every=2)
    assert [(report["step"], report["loss"]) for report in recorder.reports] == [(2, 2.0), (4, 5.0), (5, 8.0)]
    assert [report["z_loss"] for report in recorder.reports] == pytest.approx([0.02, 0.05, 0.08])
    assert recorder.observer.last_loss == 8.0
    assert recorder.closed == 2  # display and tracker


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
def test_a_report_after_a_resume_is_that_of_the_run_which_was_not_stopped(stop: int) -> None:
    losses, skipped = [0.1, 3.7, math.nan, 5.2, 8.9, 0.3, 1.1, 2.2], (2,)
    whole = observe(losses, every=4, skipped=skipped, custom=True)
    before = observe(losses[:stop], every=4, skipped=skipped, custom=True)
    kept = json.loads(json.dumps(before.observer.collector.state_dict()))
    later = tuple(index - stop for index in skipped)
    after = observe(losses[stop:], every=4, skipped=later, done=stop, kept=kept, custom=True)
    reports = before.reports + after.reports
    seen, expected = (
        {
            each["step"]: [
                value for name, value in each.items() if name in KEPT or name.startswith(("loss/", "custom/"))
            ]
            for each in given
        }
        for given in (reports, whole.reports)
    )
    assert {step: seen[step] for step in expected} == expected
    assert seen.keys() == expected.keys() | {stop}
    assert after.reports[-1]["step_seconds"] == 2.0  # rates are those of the process


def test_a_report_tells_datasets_apart_and_a_skipped_step_does_not_spoil_the_means() -> None:
    recorder = observe([1.0, math.nan, 3.0], every=3, skipped=(1,), custom=True)
    [report], values = recorder.reports, recorder.logged[0][1]
    assert (report["loss"], report["skipped_updates"], report["token_accuracy"]) == (2.0, 1, 0.5)
    assert (values["loss/web"], values["loss/code"], values["token_accuracy"], values["custom/mine"]) == (2, 2, 0.5, 1)
    assert recorder.observer.newest == values and values["perplexity"] == pytest.approx(math.exp(2.0))
    assert values["param_norm"] == pytest.approx(5.0)  # of 9 + 16 ones
    assert (values["learning_rate_group_0"], values["learning_rate_group_1"]) == (0.1, 0.02)
    assert values["tokens_seen"] == 30 and values["grad_norm"] == 0.5


@pytest.mark.parametrize(("loss", "skipped", "name"), [(math.nan, (0,), "loss"), (1e4, (), "perplexity")])
def test_what_is_no_number_is_null(loss: float, skipped: tuple[int, ...], name: str) -> None:
    recorder = observe([loss], every=1, skipped=skipped)
    assert recorder.logged[0][1][name] is None


SCORE = {"scores": [f"{__name__}:Mine"]}
# what the first and the second start measure, what the sums become between them, a name in the report, and its value
RESUMES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[dict[str, Any]], Any], str, float | None]] = {
    "a metric that is not finite": (
        {"custom": True},
        {"custom": True},
        lambda kept: kept | {"custom": {"mine": [None, 4]}},
        "custom/mine",
        1.5,
    ),
    "a metric that is measured no more": ({"custom": True}, {}, dict, "custom/mine", None),
    "the same score": (SCORE, SCORE, dict, "custom/Mine", 6.0),
    "a new score": ({}, SCORE, dict, "custom/Mine", 3.0),
    "a score that is measured no more": (SCORE, {}, dict, "custom/Mine", None),
}


@pytest.mark.parametrize("case", RESUMES)
def test_sums_continue_after_a_resume_if_the_same_is_measured(case: str) -> None:
    first, second, become, name, value = RESUMES[case]
    kept = json.loads(json.dumps(observe([1.0], every=2, **first).observer.collector.state_dict()))
    before_a_step = observe([], every=2, done=1, kept=kept, **first).observer.collector
    assert before_a_step.state_dict() == kept  # saved before the first step of the resume
    (report,) = observe([3.0], every=2, done=1, kept=become(kept), **second).reports
    assert report["loss"] == 2.0 and report.get(name) == value
    assert observe([], every=2).observer.collector.state_dict() == {}


def test_rates_mfu_and_time_left_follow_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "flops_per_token", lambda shape, span: span * 1e11)
    monkeypatch.setattr(throughput, "recomputed_flops_per_token", lambda parallel, shape, span: span * 0.25e11)
    recorder = observe([1.0] * 4, every=2, spans=(8.0, 2.0, 20.0, 40.0))  # by the attention span
    report = recorder.reports[0]
    assert report["step_seconds"] == 2.0
    assert report["tokens_per_second_per_gpu"] == report["tokens_per_second_per_gpu_overall"] == 5.0
    assert report["tokens_per_day"] == 5.0 * 86400 and report["samples_per_second"] == 1.0
    assert report["time_left_seconds"] == pytest.approx(4.0)
    assert report["memory_gib"] > 0 and report["memory_reserved_gib"] is None
    expected = [0.5 * 5.0 / 20.0, 3.0 * 5.0 / 20.0]  # 5 tokens/s at 0.5 and 3 TFLOP each, of 20 TFLOP/s
    assert [report["mfu"] for report in recorder.reports] == pytest.approx(expected)
    assert [report["hfu"] for report in recorder.reports] == pytest.approx([1.25 * mfu for mfu in expected])


def test_time_left_and_tokens_per_day_count_evaluations_and_saves() -> None:
    report = observe([1.0] * 4, every=2, evaluation_seconds=3.0).reports[0]
    assert report["step_seconds"] == 2.0 and report["tokens_per_second_per_gpu_overall"] == 5.0
    assert report["tokens_per_day"] == 2.0 * 86400  # 20 tokens in 10 seconds
    assert report["time_left_seconds"] == pytest.approx(10.0)


def test_an_evaluation_is_shown_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pretraining")
    recorder = observe([1.0], every=1)
    recorder.observer.after_evaluation(
        Progress(7, 70), {"evaluation_loss": 2.0, "evaluation_loss/web": math.nan}, ["one", "two"]
    )
    logged = {"tokens_seen": 70, "evaluation_loss": 2.0, "evaluation_loss/web": None}
    assert recorder.logged[-1] == (7, logged)
    assert caplog.messages[-2:] == ["step 7  one", "step 7  two"]


def test_a_lap_is_training_less_what_activities_took_and_with_the_wait_for_data() -> None:
    seconds = [100.0]

    def wait(amount: float) -> float:
        seconds.append(amount)
        return amount

    stopwatch = Stopwatch(lambda: sum(seconds))
    wait(3)
    with stopwatch.measure("evaluation"):
        wait(5)
    with stopwatch.measure("data"):
        wait(2)
    assert stopwatch.lap() == (5, {"evaluation": 5, "data": 2})
    wait(4)
    assert stopwatch.lap() == (4, {}) and (stopwatch.overall_training_seconds, stopwatch.elapsed) == (9, 14)
    with stopwatch.measure("setup"):
        wait(50)
    stopwatch.restart()
    wait(2)
    assert stopwatch.lap() == (2, {}) and (stopwatch.overall_training_seconds, stopwatch.elapsed) == (11, 66)
    for _ in stopwatch.watch((wait(1) for _ in range(3)), "data"):
        wait(10)
    assert stopwatch.lap() == (33, {"data": 3})
