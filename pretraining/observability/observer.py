"""The observer, which sums step outcomes and reports them at an interval.

    StepOutcome of each step --sums on the device--> a report: values by name --> display, metrics.jsonl, trackers

Between reports the sums stay on the device, and the host does not wait. A report waits once. It all-reduces the sums,
the parameter norm over shards, and the memory peaks; rank 0 sends the values to display and trackers.

A checkpoint keeps the sums since the last report, so a resume does not change the next reported loss. Rates only count
the training time of this process.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pretraining.config.training import TrainConfig
from pretraining.distributed.grad_norm import gradient_norm, local_part
from pretraining.distributed.processes import Processes
from pretraining.observability.custom_metrics import Ratio, Sums
from pretraining.observability.display import Display, choose_display, perplexity_of
from pretraining.observability.events import Events
from pretraining.observability.step_outcome import StepOutcome
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch, Throughput
from pretraining.observability.trackers import Trackers
from pretraining.progress import Interval, Progress, TrainState

log = logging.getLogger(__name__)

BUILTIN_COLUMNS = 4
"""Number of score columns in every run; checkpoints name the columns if there are more."""


class Observer:
    """The reports of a run, as a context around the loop. The last step of an invocation is always reported.

    Args:
        state: current position of the run.
        throughput: rates, which reports include.
        training_tokens: tokens of one pass over the datasets.
        optimizer: source of parameters and learning rates.
        shard_group: processes that shard one copy of the parameters.
        datasets: names of the datasets, in the order of a step's scores.
        score_columns: names of the sums in a step's scores (observability/metrics.py).
        score_values: function from sums to scores.

    Attributes:
        step_seconds: mean seconds per step of the latest reports of this invocation.
        last_loss: latest reported loss, also of an earlier invocation.
        newest: latest reported values of this invocation, by name.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: Processes,
        state: TrainState,
        throughput: Throughput,
        training_tokens: int | None,
        trackers: Trackers,
        *,
        optimizer: torch.optim.Optimizer,
        shard_group: dist.ProcessGroup,
        events: Events,
        datasets: tuple[str, ...],
        score_columns: tuple[str, ...],
        score_values: Callable[[Sequence[float]], dict[str, float]],
    ) -> None:
        self.state, self.throughput, self.trackers, self.events = state, throughput, trackers, events
        self.step_seconds: deque[float] = deque(maxlen=1000)
        self.last_loss: float | None = None
        self.newest: dict[str, Any] = {}
        self._interval = Interval(config.report.report_interval, training_tokens)
        self._optimizer, self._shard_group, self._device = optimizer, shard_group, processes.device
        self._display = Display()
        if processes.is_main:
            is_benchmark = config.data.use_dummy_dataset
            self._display = choose_display(
                config.report.progress, state.total_steps, processes.world_size, is_benchmark
            )
        self._stragglers = StragglerWatch(config.guard.straggler_factor, processes.activity)
        self._datasets, self._score_columns, self._score_values = datasets, score_columns, score_values
        self._unreported: StepOutcome | None = None  # outcome of the last step
        self._clear_sums()

    @property
    def stopwatch(self) -> Stopwatch:
        """Stopwatch of the run."""
        return self.throughput.stopwatch

    def __enter__(self) -> Observer:
        self._display.__enter__()
        self.stopwatch.restart()  # the setup is not training time
        self._stragglers.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None and self.state.early_end and self._unreported is not None:
            self._report(self.state, self._unreported)  # an evaluation after the step stopped the run
        self._stragglers.stop()
        self._display.__exit__(*raised)
        self.trackers.close()

    def after_step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Add a step to the sums; report if a report is due or the run stops."""
        kept = ~outcome.skipped
        # A skipped step's loss may be NaN.
        self._loss_sum += torch.where(kept, outcome.loss_sum, 0.0)
        self._z_loss_sum += torch.where(kept, outcome.z_loss_sum, 0.0)
        self._valid_tokens += torch.where(kept, outcome.valid_tokens, 0)
        self._scores += torch.where(kept, outcome.scores, 0.0)
        for name, pair in outcome.custom.items():
            self._custom[name] = self._custom.get(name, 0.0) + torch.where(kept, pair, 0.0)
        self._skipped += outcome.skipped
        self._steps += 1
        self._attention_spans += outcome.attention_span
        self._spans_counted += 1
        self._display.advance(state.step)
        is_due = self._interval.is_due(state)
        is_reported = is_due or state.stopping
        if is_reported:
            self._report(state, outcome)
        self._unreported = None if is_reported else outcome
        if is_due:  # an early report at the end of an invocation keeps the sums for the next invocation
            self._clear_sums()

    def after_evaluation(self, progress: Progress, values: Mapping[str, float], lines: Sequence[str]) -> None:
        """Track the values of an evaluation, and log its lines."""
        for line in lines:
            log.info("step %d  %s", progress.steps, line)
        self._track(progress.steps, {"tokens_seen": progress.tokens, **values})
        losses = {name: _finite(value) for name, value in values.items() if name.startswith("evaluation_loss")}
        self.events.add("evaluation", progress.steps, **losses)

    def _track(self, step: int, values: Mapping[str, float | None]) -> None:
        finite = {name: _finite(value) for name, value in values.items()}
        self.newest |= finite
        self.trackers.log(step, finite)

    def _clear_sums(self) -> None:
        def zeros(*sizes: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=self._device)

        self._steps = 0
        self._loss_sum, self._z_loss_sum = zeros(), zeros()
        self._valid_tokens, self._skipped = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self._scores = zeros(len(self._datasets), len(self._score_columns))
        self._custom: Sums = {}  # in the same order on every rank
        self._attention_spans, self._spans_counted = 0.0, 0

    def _report(self, state: TrainState, outcome: StepOutcome) -> None:
        own_spans = torch.full_like(self._loss_sum, self._attention_spans)
        same = (self._valid_tokens, self._skipped, outcome.grad_norm, self._parameter_norm())
        loss_sum, z_loss_sum, spans, scores, *custom, valid_tokens, skipped, grad_norm, param_norm = sum_over_ranks(
            (self._loss_sum, self._z_loss_sum, own_spans, self._scores, *self._custom.values()), same
        )
        rates = self.throughput.report(state, spans / self._spans_counted / dist.get_world_size())
        loss = loss_sum / valid_tokens if valid_tokens else math.nan
        totals = self._score_values([sum(column) for column in zip(*scores, strict=True)])
        values: dict[str, float | None] = {
            "tokens_seen": state.progress.tokens,
            "loss": loss,
            "perplexity": perplexity_of(loss),
            "z_loss": z_loss_sum / valid_tokens if valid_tokens else math.nan,
            **{name: value for name, value in totals.items() if name not in ("loss", "perplexity")},
            "learning_rate": outcome.learning_rate,
            "grad_norm": grad_norm,
            "param_norm": param_norm,
            "skipped_updates": int(skipped),
            **rates,
        }
        for index, group in enumerate(self._optimizer.param_groups):
            values[f"learning_rate_group_{index}"] = float(group["lr"])
        for name, sums in zip(self._datasets, scores, strict=True):
            values[f"loss/{name}"] = self._score_values(sums)["loss"]
        values |= {f"custom/{name}": Ratio(*pair).value for name, pair in zip(self._custom, custom, strict=True)}
        self.last_loss = _finite(loss)
        self.step_seconds.append(step_seconds := rates["step_seconds"])
        self._display.show(state.step, values)
        for line in self._stragglers.report(step_seconds):
            log.info(line)
        self._track(state.step, values)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks since the last due report, or {} without a step; collective if not empty."""
        if self._steps == 0:
            return {}
        loss_sum, z_loss_sum, scores, *custom = sum_over_ranks(
            (self._loss_sum, self._z_loss_sum, self._scores, *self._custom.values())
        )
        own = {} if len(self._score_columns) == BUILTIN_COLUMNS else {"score_columns": list(self._score_columns)}
        return {
            "steps": self._steps,
            "loss_sum": _finite(loss_sum),
            "z_loss_sum": _finite(z_loss_sum),
            "valid_tokens": int(self._valid_tokens.item()),
            "skipped_updates": int(self._skipped.item()),
            "scores": {name: list(map(_finite, sums)) for name, sums in zip(self._datasets, scores, strict=True)},
            "custom": {name: list(map(_finite, pair)) for name, pair in zip(self._custom, custom, strict=True)},
            **own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add the sums of a checkpoint; rank 0 gets those that are all-reduced.

        Scores start at zero for a dataset with non-finite sums, and for all datasets if the score columns changed.
        """
        if state["loss_sum"] is None or state["z_loss_sum"] is None:
            return
        self._steps += state["steps"]
        self._valid_tokens += state["valid_tokens"]  # global counts on every rank
        self._skipped += state["skipped_updates"]
        columns = state.get("score_columns", list(self._score_columns[:BUILTIN_COLUMNS]))
        scores = state.get("scores", {}) if columns == list(self._score_columns) else {}
        is_main = dist.get_rank() == 0
        if is_main:
            self._loss_sum += state["loss_sum"]
            self._z_loss_sum += state["z_loss_sum"]
            for row, name in zip(self._scores, self._datasets, strict=True):
                if None not in (sums := scores.get(name, [None])):
                    row += torch.tensor(sums, dtype=torch.float64, device=self._device)
        for name, pair in state.get("custom", {}).items():
            of_rank = pair if is_main and None not in pair else [0.0, 0.0]
            self._custom[name] = torch.tensor(of_rank, dtype=torch.float64, device=self._device)

    def _parameter_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all parameters, a scalar on the device that is equal on every rank."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return gradient_norm([local_part(parameter.detach()) for parameter in parameters], self._shard_group)


def sum_over_ranks(sums: Sequence[torch.Tensor], same: Sequence[torch.Tensor] = ()) -> list[Any]:
    """All-reduce tensors, and return all as numbers or nested lists; the host waits once.

    Args:
        sums: float64 tensors of this rank.
        same: tensors that are equal on all ranks, and are not summed.
    """
    summed = torch.cat([each.flatten() for each in sums])
    dist.all_reduce(summed)
    numbers = torch.cat((summed, *(each.double().flatten() for each in same))).cpu()
    tensors = (*sums, *same)
    parts = numbers.split([each.numel() for each in tensors])
    return [part.view(each.shape).tolist() for part, each in zip(parts, tensors, strict=True)]


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
