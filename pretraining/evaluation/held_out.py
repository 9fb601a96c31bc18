"""How well a model predicts documents that it is never trained on: several named sets, the same sequences each time.

    batches of each source --model--> sums by set (scores.py) --all-reduce--> Evaluation

The loss that decides which checkpoint is the best is that of the set `--best_by` names, or the mean over the tokens of
all sets. Evaluations compare along a run and between runs, and are the same on any number of processes.

A run that is to stop does not wait for an evaluation: it is left out, or broken off between two batches, and stays
pending. The next start evaluates first, with the same weights, so its losses are those of a run that was never stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pretraining.data.batch import StepBatch
from pretraining.distributed.fsdp import reshard_model
from pretraining.evaluation.early_stopping import EarlyStopping
from pretraining.evaluation.generation import TextSampler
from pretraining.evaluation.scores import Scores
from pretraining.observability.custom_metrics import NO_METRICS, CustomMetrics, Ratio, Sums
from pretraining.observability.display import CUSTOM
from pretraining.observability.observer import Observer, sum_over_ranks
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, TrainState

log = logging.getLogger(__name__)

PENDING_KEY = "owed"  # in checkpoints
MEAN = "mean"


@dataclass(frozen=True)
class EvaluationSource:
    """Batches to evaluate on, whose rows are of one or several sets.

    Attributes:
        sets: their names, in the order of the batches' datasets.
        open_batches: opens the batches of one evaluation, from the first.
    """

    sets: tuple[str, ...]
    open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found.

    Attributes:
        scores: make numbers of sums.
        sums: of each set by its name, in the order of `scores.columns`, and under None those over all sets.
        custom: the user's metrics by name, of the same.
    """

    scores: Scores
    sums: dict[str | None, list[float]]
    custom: dict[str | None, dict[str, Ratio]]

    @property
    def sets(self) -> list[str]:
        """Return the names of the sets."""
        return [name for name in self.sums if name is not None]

    def tokens(self, name: str | None = None) -> int:
        """Return how many tokens of a set count; of all sets without a name."""
        return int(self.sums[name][self.scores.columns.index("tokens")])

    def numbers(self, name: str | None = None) -> dict[str, float]:
        """Return the scores of a set that are known, and `custom/<name>` of the user's metrics.

        Args:
            name: of the set; None = the mean over the tokens of all sets.
        """
        custom = {f"{CUSTOM}{metric}": ratio.value for metric, ratio in self.custom[name].items()}
        return self.scores.values(self.sums[name]) | custom

    def values(self) -> dict[str, float]:
        """Return the numbers for trackers, flat: those of the mean, and behind a slash those of each set."""
        values: dict[str, float] = {}
        for name in self.sums:
            suffix = "" if name is None else f"/{name}"
            values |= {f"evaluation_{number}{suffix}": value for number, value in self.numbers(name).items()}
        return values

    def lines(self) -> list[str]:
        """Return the numbers for people: the mean, then a line per set if there are several."""
        lines = [f"evaluation_{self._line(None)}"]
        if len(self.sets) > 1:
            width = max(map(len, self.sets))
            lines += [f"  {name:<{width}}  {self._line(name)}" for name in self.sets]
        return lines

    def _line(self, name: str | None) -> str:
        numbers = self.numbers(name).items()
        return "  ".join(f"{number.removeprefix(CUSTOM)} {format_score(value)}" for number, value in numbers)


def format_score(value: float | None) -> str:
    """Return a score with four decimals, or four digits if it is huge; "-" if it is not known."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Sequence[EvaluationSource],
    device: torch.device,
    should_stop: Callable[[], bool],
    scores: Scores,
    byte_lengths_V: Tensor | None = None,
    metrics: CustomMetrics = NO_METRICS,
) -> Evaluation | None:
    """Evaluate on all sources, in every process; return None if it is told to stop meanwhile.

    Args:
        model: returns the `HeadLoss` of a micro-batch's `ModelInputs`.
        sources: where batches come from.
        device: of the model.
        should_stop: asked between batches by all ranks, which all get the same answer.
        scores: what is measured of each token.
        byte_lengths_V: of the text of each token; None = bits per byte are not known.
        metrics: of the user's own.
    """
    columns = len(scores.columns)
    # float64 sums of this rank: of each source's sets and scores, and of the user's metrics by set.
    sums = [torch.zeros(len(source.sets), columns, dtype=torch.float64, device=device) for source in sources]
    custom: list[list[Sums]] = [[{} for _ in source.sets] for source in sources]
    # As in training, in float32: the sum over the scores would differ from that of earlier versions in its last digits.
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for source, totals, of_sets in zip(sources, sums, custom, strict=True):
        with source.open_batches() as batches:
            for batch in batches:
                if should_stop():
                    reshard_model(model)
                    return None
                for host_batch in batch.micro_batches:
                    micro_batch = host_batch.to(device, non_blocking=True)
                    inputs = micro_batch.model_inputs()
                    outputs = model(*inputs)
                    metrics.add_by_set(of_sets, outputs, inputs, micro_batch)
                    loss_sum += outputs.objective_sum.double() - outputs.z_loss_sum
                    kept_BS2, datasets = outputs.tokens_BS2, len(source.sets)
                    totals += scores.measure(kept_BS2, inputs.labels_BS, micro_batch, datasets, byte_lengths_V)
    reshard_model(model)
    nothing = loss_sum.new_zeros(len(Ratio._fields))  # where this rank has no row of a set
    pairs = [each.get(name, nothing) for of_sets in custom for each in of_sets for name in metrics.names]
    total, *found = sum_over_ranks([loss_sum, *sums, *pairs])
    names = [name for source in sources for name in source.sets]
    of_each: dict[str | None, list[float]] = dict(zip(names, chain(*found[: len(sums)]), strict=True))
    ratios = iter(Ratio(*pair) for pair in found[len(sums) :])
    own: dict[str | None, dict[str, Ratio]] = {name: {each: next(ratios) for each in metrics.names} for name in names}
    of_all = [sum(column) for column in zip(*of_each.values(), strict=True)]
    of_all[scores.columns.index("losses")] = total
    own_of_all = {each: Ratio.total(own[name][each] for name in names) for each in metrics.names}
    return Evaluation(scores, {None: of_all, **of_each}, {None: own_of_all, **own})


@dataclass
class Evaluator:
    """Evaluations on an interval and at the end of the run.

    Attributes:
        model, sources, device, should_stop, scores, byte_lengths_V, metrics: as in `evaluate`; no sources = never.
        interval: how often; the run's last step is always evaluated.
        best_by: the set whose loss decides which checkpoint is best; None = the mean.
        early_stopping: ends the run if that loss does not come down any more.
        sampler: has the model write a text after each evaluation but the run's last; None = it writes none.
        pending: whether an evaluation of the present weights is due and not done.
    """

    model: nn.Module
    sources: Sequence[EvaluationSource]
    device: torch.device
    interval: Interval
    stopwatch: Stopwatch
    observer: Observer
    should_stop: Callable[[], bool]
    scores: Scores = field(default_factory=Scores)
    best_by: str | None = None
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    byte_lengths_V: Tensor | None = None
    metrics: CustomMetrics = NO_METRICS
    sampler: TextSampler | None = None
    pending: bool = False

    def maybe_run(self, state: TrainState) -> float | None:
        """Evaluate if it is due after this step, or pending; returns the loss that decides, in nats per token."""
        if not self.sources or not (self.pending or state.finished or self.interval.is_due(state)):
            return None
        self.pending = True
        if state.preempted:
            return None
        with self.stopwatch.measure("evaluation"):
            model, sources, device = self.model, self.sources, self.device
            found = evaluate(model, sources, device, self.should_stop, self.scores, self.byte_lengths_V, self.metrics)
        if found is None:
            return None
        self.pending = False
        self.observer.after_evaluation(state.progress, found.values(), found.lines())
        loss = found.numbers(self.best_by)["loss"]
        self.early_stopping.note(loss, state)  # may make it the run's last, whose sample comes at the end
        if self.sampler is not None and not state.finished:
            with self.stopwatch.measure("evaluation"):
                sample = self.sampler.sample(self.model, self.device)
            log.info("step %d  a sample of its text:\n%s", state.step, sample.indented())
            self.observer.events.add("sample", state.step, prompt=sample.prompt, text=sample.text)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, JSON-able."""
        return {PENDING_KEY: self.pending, **self.early_stopping.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept."""
        self.pending = bool(self.sources) and bool(state[PENDING_KEY])
        self.early_stopping.load_state_dict(state)
