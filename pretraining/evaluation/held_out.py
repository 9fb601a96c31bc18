"""Evaluation on named sets of documents that the model never trains on; each evaluation uses the same sequences.

    batches of each source --model--> sums per set (metrics.py) --all-reduce--> Evaluation

The best checkpoint has the lowest loss on the set `--best_by`, or the lowest mean over all sets. Held-out sets count in
the mean by the weights of training, and a set of `--eval_datasets` by its tokens. Evaluations are comparable along a
run and between runs, and do not depend on the batch size and the number of processes.

The sets are defined at the first start of a run: the number of sequences, the weights, and the content of the files. A
checkpoint records this (`EvaluationRecord`), and the definition that its loss belongs to. If the data, the sequence
length or the document mask change, later losses have another definition, and are not compared with earlier ones.

A run that must stop skips an evaluation, or stops it between two batches, and the evaluation stays pending. The next
start runs it first, with the same weights, so its losses are those of a run without the stop.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pretraining.best import Best
from pretraining.data.batch import StepBatch
from pretraining.distributed.fsdp import reshard_model
from pretraining.durations import Duration
from pretraining.errors import ConfigError
from pretraining.evaluation.evaluators import VALUES, Evaluators, line_of
from pretraining.evaluation.generation import TextSampler
from pretraining.evaluation.tasks import NAME, Tasks
from pretraining.observability.collector import sum_over_ranks
from pretraining.observability.display import CUSTOM
from pretraining.observability.metrics import Metrics
from pretraining.observability.observer import Observer
from pretraining.progress import PENDING_EVALUATION, PENDING_TASKS, Interval, TrainState


@dataclass(frozen=True)
class EvaluationSource:
    """Batches to evaluate on, with rows of one or several sets.

    Attributes:
        sets: names of the sets, in the order of the batches' datasets.
        open_batches: returns the batches of one evaluation, from the first.
        weights: of each set in the mean; the source as a whole counts by its tokens.
        definitions: of each set, everything that its loss depends on besides the model, as JSON values.
    """

    sets: tuple[str, ...]
    open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]]
    weights: tuple[int, ...]
    definitions: tuple[Mapping[str, Any], ...]

    def factors(self, tokens: Sequence[float]) -> list[float]:
        """Return the factor of each set's sums in the mean, given the tokens of each set; 1 for a single set."""
        filled = [weight if count else 0 for weight, count in zip(self.weights, tokens, strict=True)]
        shares = (weight / max(sum(filled), 1) for weight in filled)
        return [share * (sum(tokens) / count) if count else 0.0 for share, count in zip(shares, tokens, strict=True)]


def definition_of(sources: Sequence[EvaluationSource], best_by: str | None) -> str | None:
    """Return a digest of the sets whose loss decides which checkpoint is best; None if there are no sets."""
    deciding = {
        name: {"set": definition, "weight": weight if best_by is None and len(source.sets) > 1 else 1}
        for source in sources
        for name, definition, weight in zip(source.sets, source.definitions, source.weights, strict=True)
        if best_by in (None, name)
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16] if deciding else None


@dataclass(frozen=True)
class EvaluationRecord:
    """Number of sequences and weights of sets of the first start; part of checkpoints.

    Attributes:
        sequences: of the held-out sets together, and of each set of `--eval_datasets`; None before the first
            evaluation sets.
        weights: of the held-out sets.
    """

    sequences: int | None = None
    weights: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> EvaluationRecord:
        """Return the record of a checkpoint's state; raise a TypeError if it is damaged."""
        sequences, weights = state.get("sequences"), dict(state.get("weights", {}))
        numbers = [*weights.values(), *([] if sequences is None else [sequences])]
        if not all(type(number) is int and 0 < number < 2**62 for number in numbers):
            raise TypeError(f"sequences are {sequences!r}, weights are {weights!r}")
        return EvaluationRecord(sequences, weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        if self.sequences is None:
            return {}
        return {"sequences": self.sequences, "weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a plan reads the record earlier, to open the sets."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        sums: sums per set in the order of `metrics.columns`; under None, those over all sets.
    """

    metrics: Metrics
    sums: dict[str | None, list[float]]

    @property
    def sets(self) -> list[str]:
        """Return the names of the sets."""
        return [name for name in self.sums if name is not None]

    def tokens(self, name: str | None = None) -> int:
        """Return the number of valid tokens of a set; of all sets without a name."""
        return round(self.sums[name][self.metrics.columns.index("tokens")])

    def numbers(self, name: str | None = None) -> dict[str, float]:
        """Return the known metrics of a set, or their mean over all sets."""
        return self.metrics.values(self.sums[name])

    def values(self) -> dict[str, float]:
        """Return flat values for trackers: the means, and with suffix `/<set>` the values per set."""
        values: dict[str, float] = {}
        for name in self.sums:
            suffix = "" if name is None else f"/{name}"
            values |= {f"evaluation_{number}{suffix}": value for number, value in self.numbers(name).items()}
        return values

    def lines(self) -> list[str]:
        """Return log lines: the means, then a line per set if there are several."""
        lines = [f"evaluation_{self._line(None)}"]
        if len(self.sets) > 1:
            width = max(map(len, self.sets))
            lines += [f"  {name:<{width}}  {self._line(name)}" for name in self.sets]
        return lines

    def _line(self, name: str | None) -> str:
        parts = []
        for number, value in self.numbers(name).items():
            text = f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
            parts.append(f"{number.removeprefix(CUSTOM)} {text}")
        return "  ".join(parts)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sources: Sequence[EvaluationSource],
    device: torch.device,
    should_stop: Callable[[], bool],
    metrics: Metrics,
    byte_lengths_V: Tensor | None = None,
) -> Evaluation | None:
    """Evaluate on all sources, in every process; return None if a stop is requested meanwhile.

    Args:
        model: returns the `HeadLoss` of a micro-batch's `ModelInputs`.
        should_stop: called between batches by all ranks, with the same result on all.
        byte_lengths_V: text bytes of each token; None = no bits per byte.
    """
    tables: list[Tensor | float] = [0.0] * len(sources)  # sums of this rank, [sets, columns]
    # As in training: the sum of losses per micro-batch. Summing the table would differ in the last digits.
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for index, source in enumerate(sources):
        with source.open_batches() as batches:
            for batch in batches:
                if should_stop():
                    reshard_model(model)
                    return None
                for host_batch in batch.micro_batches:
                    micro_batch = host_batch.to(device, non_blocking=True)
                    inputs = micro_batch.model_inputs()
                    outputs = model(*inputs)
                    loss_sum += outputs.objective_sum.double() - outputs.z_loss_sum
                    sums = metrics.measure(outputs, inputs, micro_batch, len(source.sets), byte_lengths_V, by_set=True)
                    tables[index] += sums
    reshard_model(model)
    width = len(metrics.columns)
    # The zeros are for a source without a batch.
    filled = [loss_sum.new_zeros(len(s.sets), width) + table for s, table in zip(sources, tables, strict=True)]
    reduced = sum_over_ranks({"loss": loss_sum, "sets": torch.cat(filled)})
    return _weigh(sources, metrics, reduced["sets"], reduced["loss"])


def _weigh(
    sources: Sequence[EvaluationSource], metrics: Metrics, rows: Sequence[list[float]], loss_sum: float
) -> Evaluation:
    """Return the evaluation with these sums per set. `loss_sum` is the loss of all sets, unless weights change it."""
    losses, tokens = (metrics.columns.index(name) for name in ("losses", "tokens"))
    names = [name for source in sources for name in source.sets]
    sums: dict[str | None, list[float]] = dict(zip(names, rows, strict=True))
    factors = [factor for source in sources for factor in source.factors([sums[name][tokens] for name in source.sets])]
    weighted = ([factor * each for each in row] for factor, row in zip(factors, rows, strict=True))
    of_all = [sum(column) for column in zip(*weighted, strict=True)]
    if all(factor == 1 for factor in factors):
        of_all[losses] = loss_sum
    return Evaluation(metrics, {None: of_all, **sums})


@dataclass
class Evaluator:
    """Evaluator on an interval and at the end of the run.

    Attributes:
        model, sources, device, should_stop, metrics, byte_lengths_V: as in `evaluate`.
        interval: evaluation interval; the run's last step is always evaluated.
        loss: loss of the run, on the set `--best_by` or the mean over all sets.
        best: number that decides which checkpoint is best and when the run stops early; possibly `loss` itself.
        evaluators: called after the sets; None = none.
        tasks: benchmark tasks, with an interval of their own; None = none.
        sampler: generates text after each evaluation except the run's last; None = no text.
        evaluation_mode: returns a context that gives the model the weights to evaluate.
        pending, tasks_pending: whether an evaluation of the current weights is due and not done.
    """

    model: nn.Module
    sources: Sequence[EvaluationSource]
    device: torch.device
    interval: Interval
    observer: Observer
    should_stop: Callable[[], bool]
    loss: Best
    best: Best
    metrics: Metrics = field(default_factory=Metrics)
    byte_lengths_V: Tensor | None = None
    sampler: TextSampler | None = None
    evaluation_mode: Callable[[], AbstractContextManager[None]] = nullcontext
    pending: bool = False
    evaluators: Evaluators | None = None
    tasks: Tasks | None = None
    tasks_interval: Interval = field(default_factory=lambda: Interval(Duration(0, "steps"), None))
    tasks_pending: bool = False

    def maybe_run(self, state: TrainState) -> bool:
        """Evaluate if an evaluation is due or pending, first on the sets, then on the tasks; return whether one was."""
        if self._has_sets and (state.finished or self.interval.is_due(state)):
            self.pending = True
        if self.tasks is not None and (state.finished or self.tasks_interval.is_due(state)):
            self.tasks_pending = True
        return self.run_pending(state)

    def run_pending(self, state: TrainState) -> bool:
        """Do the evaluations that are pending, until a stop is requested; return whether one was done."""
        with self.evaluation_mode() if self.pending or self.tasks_pending else nullcontext():
            on_sets, on_tasks = self._evaluate_sets(state), self._evaluate_tasks(state)
            if not on_sets and not on_tasks:
                return False
            was_over = bool(state.early_end)
            self.best.stop_if_due(state)  # may finish the run, whose end generates the last text
            if state.early_end and not was_over:  # the end of the run has come: evaluate what is left
                self.pending |= self._has_sets and not on_sets
                self.tasks_pending |= self.tasks is not None and not on_tasks
                self._evaluate_sets(state)
                self._evaluate_tasks(state)
            if self.sampler is not None and not state.finished and not state.preempted:
                with self.observer.stopwatch.measure("evaluation"):
                    self.sampler.show(self.model, self.device, state.step, self.observer.events)
        return True

    @property
    def _has_sets(self) -> bool:
        return bool(self.sources) or self.evaluators is not None

    def _evaluate_sets(self, state: TrainState) -> bool:
        """Evaluate on the sets, and call the evaluators, if that is pending; False = it is not, or a stop came."""
        if not self.pending or state.preempted:
            return False
        values, lines = dict[str, float](), list[str]()
        with self.observer.stopwatch.measure("evaluation"):
            if self.sources:
                model, sources, device = self.model, self.sources, self.device
                found = evaluate(model, sources, device, self.should_stop, self.metrics, self.byte_lengths_V)
                if found is None:
                    return False
                values, lines = found.values(), found.lines()
            if self.evaluators is not None:
                custom = self.evaluators.run(self.model, state.step, values)
                values |= custom
                lines += line_of(custom)
        self.pending = False
        self.observer.after_evaluation(state.progress, values, lines)
        if self.sources:
            self.loss.record(values[self.loss.measure.key], state.step)
        decides = self.best.measure
        if decides.key.startswith(VALUES):
            if decides.key not in values:
                there = ", ".join(name.removeprefix(VALUES) for name in values if name.startswith(VALUES))
                raise ConfigError(f"--best_by={decides.name}: the evaluators return {there or 'nothing'}")
            self.best.record(values[decides.key], state.step)
        return True

    def _evaluate_tasks(self, state: TrainState) -> bool:
        """Evaluate on the tasks, if that is pending; False = it is not, or a stop is requested."""
        if self.tasks is None or not self.tasks_pending or state.preempted:
            return False
        with self.observer.stopwatch.measure("evaluation"):
            found = self.tasks.evaluate(self.model, self.should_stop)
        if found is None:
            return False
        self.tasks_pending = False
        self.observer.after_evaluation(state.progress, found.values, found.lines)
        if self.best.measure.key.startswith(NAME):
            self.best.record(found.values.get(self.best.measure.key, math.nan), state.step)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        of_tasks = {PENDING_TASKS: True} if self.tasks_pending else {}
        return {PENDING_EVALUATION: self.pending, **of_tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        self.pending = self._has_sets and bool(state[PENDING_EVALUATION])
        self.tasks_pending = self.tasks is not None and bool(state.get(PENDING_TASKS))
