from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from pretraining.best import Best, Measure
from pretraining.config.read import load_train_config
from pretraining.data.batch import MicroBatch, StepBatch
from pretraining.data.tokenizer import train_tokenizer
from pretraining.distributed.processes import Processes
from pretraining.durations import Duration
from pretraining.errors import ConfigError
from pretraining.evaluation.generation import Sampling, TextSampler, check_prompt, draw_tokens, open_sampler
from pretraining.evaluation.held_out import Evaluation, EvaluationSource, Evaluator, evaluate
from pretraining.model.loss import HeadLoss
from pretraining.observability.events import Events
from pretraining.observability.metrics import Metrics
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, Progress, TrainState

pytestmark = pytest.mark.usefixtures("single_process")


class LossIsInput(nn.Module):
    """Model whose loss is the input token, and a hit if the token is 7; ignored labels do not count. With z-loss."""

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, *_: object) -> HeadLoss:
        valid = labels_BS != -100
        z_loss_sum = 0.25 * valid.sum()
        tokens_BS2 = torch.stack((tokens_BS * valid, (tokens_BS == 7) & valid), 2).float()
        return HeadLoss(tokens_BS2[..., 0].sum() + z_loss_sum, valid.sum(), z_loss_sum, tokens_BS2)


Report = tuple[int, float]


def observer_of(reports: list[Report]) -> Any:
    def report(progress: Progress, values: dict[str, float], lines: list[str]) -> None:
        reports.append((progress.steps, values["evaluation_loss"]))

    return SimpleNamespace(after_evaluation=report, events=Events(), stopwatch=Stopwatch())


def sources(opened: list[int]) -> list[EvaluationSource]:
    """Two sets, a and b, with rows in the same batches, and a third set."""
    first = MicroBatch(torch.tensor([[1, 1, 1], [1, 1, 1]], dtype=torch.int32), datasets_B=torch.tensor([0, 1]))
    second = MicroBatch(
        torch.tensor([[7, 7, 7], [9, 9, 9]], dtype=torch.int32), torch.tensor([3, 0]), datasets_B=torch.tensor([1, 0])
    )

    @contextmanager
    def open_both() -> Iterator[list[StepBatch]]:
        opened.append(1)
        yield [StepBatch(0, 0, [first]), StepBatch(1, 2, [second])]

    @contextmanager
    def open_third() -> Iterator[list[StepBatch]]:
        yield [StepBatch(0, 0, [MicroBatch(torch.tensor([[2, 3, 4]], dtype=torch.int32))])]

    return [
        EvaluationSource(("a", "b"), open_both, (1, 2), ({}, {})),
        EvaluationSource(("c",), open_third, (1,), ({},)),
    ]


def evaluator_with(
    opened: list[int], reports: list[Report], should_stop: Callable[[], bool] = lambda: False
) -> Evaluator:
    cpu, interval, observer = torch.device("cpu"), Interval(Duration(3, "steps"), None), observer_of(reports)
    loss = Best(Measure("loss", "evaluation_loss", "sets"))
    return Evaluator(LossIsInput(), sources(opened)[:1], cpu, interval, observer, should_stop, loss, loss)


def evaluated(model: nn.Module, table_V: torch.Tensor | None = None) -> Evaluation:
    found = evaluate(model, sources([]), torch.device("cpu"), lambda: False, Metrics(), table_V)
    assert found is not None
    return found


def test_each_set_has_its_numbers_and_the_mean_weighs_tokens() -> None:
    table = torch.zeros(10, dtype=torch.int64)
    table[1], table[7], table[3], table[4] = 2, 3, 1, 0
    found = evaluated(LossIsInput(), table)
    assert found.sums == {None: [23, 2, 8, 15], "a": [2, 0, 2, 4], "b": [16, 2, 4, 10], "c": [5, 0, 2, 1]}
    assert (found.tokens(), found.tokens("b"), found.sets) == (8, 4, ["a", "b", "c"])
    values = found.values()
    assert values["evaluation_loss"] == 23 / 8 and values["evaluation_loss/b"] == 4.0
    assert values["evaluation_token_accuracy/b"] == 0.5 and values["evaluation_perplexity/c"] == math.exp(2.5)
    assert values["evaluation_bits_per_byte"] == pytest.approx(23 / 15 / math.log(2))
    assert "bits" not in "".join(evaluated(LossIsInput()).values())  # without a tokenizer


def test_held_out_sets_count_in_the_mean_by_their_weights_whatever_was_read_of_each() -> None:
    first, second = sources([])
    weighted = [replace(first, weights=(3, 1)), second]
    found = evaluate(LossIsInput(), weighted, torch.device("cpu"), lambda: False, Metrics())
    assert found is not None and found.tokens() == 8
    assert found.numbers()["loss"] == pytest.approx((6 * (0.75 * 1 + 0.25 * 4) + 5) / 8)
    assert [found.numbers(name)["loss"] for name in "abc"] == [1.0, 4.0, 2.5]
    assert first.factors([0, 4]) == [0, 1] and second.factors([0]) == [0]  # a set without a token counts nothing


def test_the_mean_loss_is_that_of_the_objective_as_in_training() -> None:
    class Rounded(LossIsInput):
        def forward(self, *inputs: Any) -> HeadLoss:
            loss = super().forward(*inputs)
            return loss._replace(objective_sum=loss.objective_sum + 1)

    found = evaluated(Rounded())
    assert found.numbers()["loss"] == (23 + 3) / 8 and found.numbers("b")["loss"] == 4.0  # three micro-batches


def trained(evaluator: Evaluator, steps: int) -> TrainState:
    state = TrainState(total_steps=steps, stop_step=steps, tokens_per_step=1, progress=Progress(0, 0))
    while not state.stopping:
        state.advance(0.0)
        evaluator.maybe_run(state)
    return state


def test_evaluations_come_on_the_interval_and_at_the_end_of_the_run_and_never_without_sources() -> None:
    reports: list[Report] = []
    opened: list[int] = []
    evaluator = evaluator_with(opened, reports)
    evaluator.sampler = sampler = Mock()  # text follows each evaluation but the last
    trained(evaluator, 8)
    assert [step for step, _ in reports] == [3, 6, 8] and len(opened) == 3 and sampler.show.call_count == 2
    evaluator.sources = []
    trained(evaluator, 8)
    assert len(reports) == 3


def test_an_evaluation_that_is_broken_off_is_pending_and_done_once_by_the_next_start() -> None:
    reports: list[Report] = []
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(2, 2))
    state.advance(0.0)
    answers = iter([False, True])
    told = evaluator_with([], reports, should_stop=lambda: next(answers))
    assert not told.maybe_run(state) and told.pending and reports == []

    resumed = evaluator_with([], reports)
    resumed.load_state_dict(told.state_dict())
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(3, 3))
    assert resumed.maybe_run(state) and not resumed.pending
    assert resumed.loss.value == pytest.approx(3.0) and reports == [(3, resumed.loss.value)]
    assert not resumed.maybe_run(state)


@pytest.mark.parametrize(("done", "is_due"), [(1, False), (2, True)])
def test_a_run_that_should_stop_does_not_begin_an_evaluation(done: int, is_due: bool) -> None:
    opened: list[int] = []
    evaluator = evaluator_with(opened, [])
    state = TrainState(total_steps=8, stop_step=8, tokens_per_step=1, progress=Progress(done, done))
    state.advance(0.0, stop=15)
    assert not evaluator.maybe_run(state) and evaluator.pending is is_due and opened == []


# Generated text

CPU = torch.device("cpu")


class Successor(nn.Module):
    """Model whose likeliest next token is the last token plus one; records its inputs."""

    def __init__(self, vocab_size: int = 10) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.windows: list[list[int]] = []

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens_BS[0].tolist())
        following = (tokens_BS + 1) % self.vocab_size
        return 3.0 * nn.functional.one_hot(following, self.vocab_size).float()


def draw(model: nn.Module, prompt: list[int], count: int, ends: Sequence[int] = (), **options: Any) -> list[int]:
    def next_logits(tokens: Sequence[int]) -> torch.Tensor:
        logits_V: torch.Tensor = model(torch.tensor([tokens]))[0, -1]
        return logits_V

    sampling = Sampling(**{"seed": 0, "temperature": 0.8, "top_k": 50, "top_p": 1.0, **options})
    return list(draw_tokens(next_logits, prompt, count, sampling, ends))


def test_tokens_follow_until_an_end_token_and_draws_depend_on_the_seed_alone() -> None:
    assert draw(Successor(), [3], 9, ends=[7], temperature=0.0) == [4, 5, 6]
    assert draw(Successor(), [3], 4, temperature=5.0, top_k=1) == [4, 5, 6, 7]
    draws = [draw(Successor(), [0], 20, seed=seed, temperature=2.0) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_the_model_sees_at_most_its_context() -> None:
    model = Successor(vocab_size=3)
    TextSampler("", [1, 2, 0], (), 3, 4, 0, None).sample(model, CPU)
    assert [len(window) for window in model.windows] == [3, 4, 4]
    assert model.windows[2][:3] == model.windows[1][1:]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_model_whose_logits_are_not_finite_writes_something(value: float) -> None:
    class Overflowing(Successor):
        def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
            return torch.full_like(super().forward(tokens_BS), value)

    for temperature in (0.0, 0.01, 0.8):
        drawn = draw(Overflowing(), [3], 4, temperature=temperature)
        assert len(drawn) == 4 and set(drawn) <= set(range(10))


class Chosen(nn.Module):
    """Model whose next token has these probabilities."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits_V = torch.tensor(probabilities).log()

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.logits_V.expand(*tokens_BS.shape, -1)


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({"top_k": 0}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 0, "top_p": 0.0}, {0}),
        ({"top_k": 0, "top_p": 0.5}, {0}),
        ({"top_k": 0, "top_p": 0.81}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.9}, {0, 1}),
    ],
)
def test_tokens_are_drawn_among_the_likeliest_as_transformers_do(options: dict[str, Any], drawn: set[int]) -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert set(draw(Chosen(probabilities), [0], 300, temperature=1.0, **options)) == drawn
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits_BV = torch.tensor([probabilities]).log()
    if options.get("top_k"):
        logits_BV = warpers.TopKLogitsWarper(options["top_k"])(None, logits_BV)
    if options.get("top_p"):
        logits_BV = warpers.TopPLogitsWarper(options["top_p"])(None, logits_BV)
        assert {token for token in range(4) if logits_BV[0, token].isfinite()} == drawn


FLAGS = ["model_variant=tiny", "vocab_size=512", "use_dummy_dataset=true", "sample_tokens=4", "seq_length=8"]


def sampler_of(tmp_path: Path, *flags: str) -> TextSampler:
    train_tokenizer(["a few words"], 270).save(tmp_path)
    config = load_train_config([*FLAGS, f"tokenizer_path={tmp_path}", *flags])
    sampler = open_sampler(config, Processes(0, 1, 0, 1, CPU))
    assert sampler is not None
    return sampler


@pytest.mark.parametrize(
    ("flags", "prompt", "ends"),
    [
        (["sample_prompt=a"], [65], (0,)),
        (["sample_prompt=a", "bos_token=5", "sep_token=7"], [5, 65], (7,)),
        (["sample_prompt=", "sep_token=7"], [7], (7,)),
        (["sample_prompt=a<|endoftext|>a"], [65, 0, 65], (0,)),
        (["sample_prompt=<|endoftext|>a", "bos_token=0"], [0, 65], (0,)),
        (["sample_prompt=a", "bos_token=none", "sep_token=none"], [65], (0,)),
    ],
)
def test_prompts_and_ends_are_those_of_training(
    tmp_path: Path, flags: list[str], prompt: list[int], ends: tuple[int, ...]
) -> None:
    sampler = sampler_of(tmp_path, *flags)
    assert (sampler.prompt_tokens, sampler.ends) == (prompt, ends)
    (tmp_path / "tokenizer.json").unlink()  # which is needed at the start alone
    assert isinstance(sampler.sample(Successor(vocab_size=512), CPU), str)


def test_a_model_with_fewer_rows_than_the_tokenizer_is_refused_with_the_number_needed(tmp_path: Path) -> None:
    for flags, source in (([], "the beginning of generated text"), (["sample_prompt=a"], "--sample_prompt")):
        with pytest.raises(ConfigError, match=f"^{source} gives token .*the model has 512 rows"):
            sampler_of(tmp_path, *flags, "bos_token=700")
    tokenizer = train_tokenizer(["a few words"], 270)
    with pytest.raises(ConfigError, match="the model has 260 rows"):
        check_prompt("--prompt", [265], tokenizer, 260, 8)


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    flags = ["sample_prompt=abcdefghi", "bos_token=5"]
    with pytest.raises(ConfigError, match="--sample_prompt gives 10 tokens, and the model has a context of 8"):
        sampler_of(tmp_path, *flags)
