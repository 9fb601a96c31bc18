"""Collects what steps leave behind and reports it when a report is due.

    StepOutcome of each step --sums on the device--> a report: numbers by name --> display, metrics.jsonl, trackers

Between reports everything stays on the device: adding to running sums needs no answer from it. A report is the one
place where the host waits, once: one all-reduce of the sums, one over the shards for the norm of the parameters, one of
the peaks of memory, and the numbers go to the display and the trackers of rank 0.

A checkpoint between two reports keeps the sums since the first of them, so the second one has the same loss whether the
run was stopped in between or not. Rates are those of this process: time that it did not train does not count.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape
from pretraining.distributed.grad_norm import gradient_norm, local_part
from pretraining.distributed.processes import Processes
from pretraining.estimate.devices import peak_tflops
from pretraining.estimate.flops import flops_per_token, recomputed_flops_per_token, recomputed_share
from pretraining.observability.custom_metrics import Ratio, Sums
from pretraining.observability.display import Display, choose_display, perplexity_of
from pretraining.observability.events import Events
from pretraining.observability.out_of_memory import peak_bytes
from pretraining.observability.step_outcome import StepOutcome
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import StepTimes, Stopwatch, device_name
from pretraining.observability.trackers import Trackers
from pretraining.progress import Interval, Progress, TrainState

log = logging.getLogger(__name__)

SHIPPED_COLUMNS = 4
"""Columns of the scores that every run has; checkpoints name the columns if there are more."""


@dataclass
class Observer:
    """Reports of a run, as a context around the loop; `build_observer` makes one from the settings.

    The end of an invocation is always reported.

    Attributes:
        flops_per_token: of the model, forward and backward, for the tokens that attention spans on average.
        recomputed_flops_per_token: what activation checkpointing adds, for the same tokens.
        peak_tflops: of a device; None where it is not known.
        seq_length: tokens of a sample.
        optimizer: its groups hold the parameters and their learning rates.
        shard_group: processes that hold the pieces of one copy of the parameters.
        state: where the run stands, at first where it starts.
        display: shows nothing on other ranks than 0.
        events: told of evaluations.
        score_columns: names of the sums of a step's scores (evaluation/scores.py).
        score_values: makes scores of sums.
        datasets: names of those that batches are of, in the order of a step's scores.
        step_times: of made-up data, which measures speed; None otherwise.
        last_loss: the newest reported loss, at first that of an earlier invocation.
        newest: the newest reported number of each name, of this invocation.
    """

    state: TrainState
    interval: Interval
    flops_per_token: Callable[[float], float]
    recomputed_flops_per_token: Callable[[float], float]
    peak_tflops: float | None
    seq_length: int
    optimizer: torch.optim.Optimizer
    shard_group: dist.ProcessGroup
    device: torch.device
    stopwatch: Stopwatch
    display: Display
    trackers: Trackers
    stragglers: StragglerWatch
    score_columns: tuple[str, ...]
    score_values: Callable[[Sequence[float]], dict[str, float]]
    events: Events = field(default_factory=Events)
    datasets: tuple[str, ...] = ()
    step_times: StepTimes | None = None
    last_loss: float | None = None
    newest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._start = self._reported = self.state.progress  # of this process, and of the last report
        self._unreported: StepOutcome | None = None  # of the last step
        self._clear_sums()

    def __enter__(self) -> Observer:
        self.display.__enter__()
        self.stopwatch.restart()  # what went before was setting up, not training
        self.stragglers.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        if raised[0] is None and self.state.early_end and self._unreported is not None:
            self._report(self.state.progress, self._unreported)  # its evaluation has made the last step the last one
        self.stragglers.stop()
        self.display.__exit__(*raised)
        self.trackers.close()

    def after_step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Count a step; report if it crossed a boundary of the interval or was the last one."""
        if self.step_times is not None:
            self.step_times.end_step()
        kept = ~outcome.skipped
        # A skipped step's loss may be NaN: it must not spoil the mean of the others.
        self._loss_sum += torch.where(kept, outcome.loss_sum, 0.0)
        self._z_loss_sum += torch.where(kept, outcome.z_loss_sum, 0.0)
        self._valid_tokens += torch.where(kept, outcome.valid_tokens, 0)
        self._scores += torch.where(kept, outcome.scores, 0.0)
        for name, pair in outcome.custom.items():
            self._custom[name] = self._custom.get(name, 0.0) + torch.where(kept, pair, 0.0)
        self._skipped += outcome.skipped
        self._steps += 1
        self._attention_spans += outcome.attention_span
        self.display.advance(state.step)
        is_due = self.interval.is_due(state)
        is_reported = is_due or state.stopping
        if is_reported:
            self._report(state.progress, outcome)
        self._unreported = None if is_reported else outcome
        if is_due:  # the sums of a report that comes early, at an invocation's end, go on in the next one's
            self._clear_sums()

    def after_evaluation(self, progress: Progress, values: Mapping[str, float], lines: Sequence[str]) -> None:
        """Keep the numbers of an evaluation, and show each of its lines."""
        for line in lines:
            log.info("step %d  %s", progress.steps, line)
        self._keep(progress.steps, {"tokens_seen": progress.tokens, **values})
        losses = {name: _finite(value) for name, value in values.items() if name.startswith("evaluation_loss")}
        self.events.add("evaluation", progress.steps, **losses)

    def _keep(self, step: int, values: Mapping[str, float | None]) -> None:
        finite = {name: _finite(value) for name, value in values.items()}
        self.newest |= finite
        self.trackers.log(step, finite)

    def _clear_sums(self) -> None:
        def zeros(*sizes: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.zeros(sizes, dtype=dtype, device=self.device)

        self._steps = 0
        self._loss_sum, self._z_loss_sum = zeros(), zeros()
        self._valid_tokens, self._skipped = zeros(dtype=torch.int64), zeros(dtype=torch.int64)
        self._scores = zeros(len(self.datasets), len(self.score_columns))
        self._custom: Sums = {}  # in the same order on every rank
        self._attention_spans = 0.0

    def _report(self, now: Progress, outcome: StepOutcome) -> None:
        spans = torch.full_like(self._loss_sum, self._attention_spans)
        same = (self._valid_tokens, self._skipped, outcome.grad_norm, self._parameter_norm())
        numbers, scores, custom = self._sum_over_ranks((self._loss_sum, self._z_loss_sum, spans), same)
        loss_sum, z_loss_sum, attention_spans, valid_tokens, skipped, grad_norm, param_norm = numbers
        memory = self._memory_of_the_fullest_rank()
        seconds, spent = self.stopwatch.lap()  # after `tolist`: the device has finished the steps
        if self.step_times is not None:
            self.step_times.read()
        loss = loss_sum / valid_tokens if valid_tokens else math.nan
        totals = self.score_values([sum(column) for column in zip(*scores.values(), strict=True)])
        values: dict[str, float | None] = {
            "tokens_seen": now.tokens,
            "loss": loss,
            "perplexity": perplexity_of(loss),
            "z_loss": z_loss_sum / valid_tokens if valid_tokens else math.nan,
            **{name: value for name, value in totals.items() if name not in ("loss", "perplexity")},
            "learning_rate": outcome.learning_rate,
            "grad_norm": grad_norm,
            "param_norm": param_norm,
            "skipped_updates": int(skipped),
            **self._speed(now, seconds, attention_spans),
            "data_share": spent.get("data", 0.0) / seconds,
            **memory,
            "time_left_seconds": self._time_left(now),
        }
        for index, group in enumerate(self.optimizer.param_groups):
            values[f"learning_rate_group_{index}"] = group["lr"]
        values |= {f"loss/{name}": self.score_values(sums)["loss"] for name, sums in scores.items()}
        values |= {f"custom/{name}": metric.value for name, metric in custom.items()}
        self.last_loss = _finite(loss)
        self.display.show(now.steps, values)
        for line in self.stragglers.report(seconds / (now.steps - self._reported.steps)):
            log.info(line)
        self._keep(now.steps, values)
        self._reported = now
        self._attention_spans = 0.0

    def _speed(self, now: Progress, seconds: float, attention_spans: float) -> dict[str, float | None]:
        """Return the rates since the last report, or of this process if their names say `overall`."""
        steps, gpus = now.steps - self._reported.steps, dist.get_world_size()
        rate = (now.tokens - self._reported.tokens) / seconds
        overall = (now.tokens - self._start.tokens) / self.stopwatch.overall_training_seconds
        span = attention_spans / (steps * gpus)
        model_tflops = self.flops_per_token(span) * rate / gpus / 1e12
        tflops = model_tflops + self.recomputed_flops_per_token(span) * rate / gpus / 1e12
        return {
            "step_seconds": seconds / steps,
            "samples_per_second": rate / self.seq_length,
            "tokens_per_second_per_gpu": rate / gpus,
            "tokens_per_second_per_gpu_overall": overall / gpus,
            "tokens_per_day": overall * 86400,
            "mfu": None if self.peak_tflops is None else model_tflops / self.peak_tflops,
            "hfu": None if self.peak_tflops is None else tflops / self.peak_tflops,
        }

    def _time_left(self, now: Progress) -> float:
        tokens_per_step = (now.tokens - self._reported.tokens) / (now.steps - self._reported.steps)
        overall = (now.tokens - self._start.tokens) / self.stopwatch.overall_training_seconds
        return (self.state.total_steps - now.steps) * tokens_per_step / overall

    def state_dict(self) -> dict[str, Any]:
        """Return the sums since the last report that was due, of all ranks; a collective call that waits for them.

        Without a step since then there is nothing to keep, nothing to wait for, and the result is empty.
        """
        if self._steps == 0:
            return {}
        (loss_sum, z_loss_sum), scores, custom = self._sum_over_ranks((self._loss_sum, self._z_loss_sum))
        own = {} if len(self.score_columns) == SHIPPED_COLUMNS else {"score_columns": list(self.score_columns)}
        return {
            "steps": self._steps,
            "loss_sum": _finite(loss_sum),
            "z_loss_sum": _finite(z_loss_sum),
            "valid_tokens": int(self._valid_tokens.item()),
            "skipped_updates": int(self._skipped.item()),
            "scores": {name: [_finite(value) for value in of_dataset] for name, of_dataset in scores.items()},
            "custom": {name: [_finite(value) for value in metric] for name, metric in custom.items()},
            **own,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the sums of all ranks, which rank 0 holds for them.

        Scores begin again at zero for a dataset whose sums were not finite, and for all if others are measured now.
        """
        if state["loss_sum"] is None or state["z_loss_sum"] is None:
            return
        self._steps += state["steps"]
        is_main = dist.get_rank() == 0
        if is_main:
            self._loss_sum += state["loss_sum"]
            self._z_loss_sum += state["z_loss_sum"]
        if is_main and state.get("score_columns", list(self.score_columns[:SHIPPED_COLUMNS])) == [*self.score_columns]:
            for row, name in zip(self._scores, self.datasets, strict=True):
                sums = state.get("scores", {}).get(name, [None])
                if None not in sums:
                    row += torch.tensor(sums, dtype=torch.float64, device=self.device)
        for name, pair in state.get("custom", {}).items():
            of_rank = pair if is_main and None not in pair else [0.0, 0.0]
            self._custom[name] = torch.tensor(of_rank, dtype=torch.float64, device=self.device)
        self._valid_tokens += state["valid_tokens"]  # these are of all ranks, on each of them
        self._skipped += state["skipped_updates"]

    def _parameter_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all parameters, a scalar on the device, the same on every rank."""
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        return gradient_norm([local_part(parameter.detach()) for parameter in parameters], self.shard_group)

    def _sum_over_ranks(
        self, sums: Sequence[torch.Tensor], same: Sequence[torch.Tensor] = ()
    ) -> tuple[list[float], dict[str, list[float]], dict[str, Ratio]]:
        """Add up scalars, the scores of each dataset and the user's metrics; a collective call that waits, once.

        Args:
            sums: of this rank.
            same: more scalars, which are the same on all ranks and stay as they are.

        Returns:
            All scalars, the sums of scores by dataset, and the user's metrics by name.
        """
        summed = torch.cat((torch.stack(list(sums)), self._scores.flatten(), *self._custom.values()))
        dist.all_reduce(summed)
        numbers = iter(torch.cat((summed, *(number.double().view(1) for number in same))).tolist())
        scalars = list(islice(numbers, len(sums)))
        scores = {name: list(islice(numbers, len(self.score_columns))) for name in self.datasets}
        custom = {name: Ratio(*islice(numbers, len(Ratio._fields))) for name in self._custom}
        return [*scalars, *numbers], scores, custom

    def _memory_of_the_fullest_rank(self) -> dict[str, float | None]:
        """Return GiB of the fullest rank: peak, allocated now, reserved; on a CPU only the peak of the process."""
        sizes = [peak_bytes(self.device)]
        if self.device.type == "cuda":
            sizes += [torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)]
        maxima = torch.tensor(sizes, dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        names = ("memory_gib", "memory_allocated_gib", "memory_reserved_gib")
        return dict(zip_longest(names, [size / 2**30 for size in maxima.tolist()]))


def build_observer(
    config: TrainConfig,
    shape: LlamaShape,
    processes: Processes,
    state: TrainState,
    stopwatch: Stopwatch,
    training_tokens: int | None,
    trackers: Trackers,
    *,
    optimizer: torch.optim.Optimizer,
    shard_group: dist.ProcessGroup,
    events: Events,
    datasets: tuple[str, ...],
    score_columns: tuple[str, ...],
    score_values: Callable[[Sequence[float]], dict[str, float]],
) -> Observer:
    """Make the observer of a run; `training_tokens` are those of one pass over the datasets."""
    peak = peak_tflops(device_name(processes.device))
    share = recomputed_share(config.parallel, shape, config.data.seq_length)
    display = Display()
    if processes.is_main:
        shows_step_time = config.data.use_dummy_dataset
        display = choose_display(config.report.progress, state.total_steps, processes.world_size, shows_step_time)
    return Observer(
        state=state,
        interval=Interval(config.report.report_interval, training_tokens),
        flops_per_token=partial(flops_per_token, shape),
        recomputed_flops_per_token=partial(recomputed_flops_per_token, shape, share),
        peak_tflops=peak,
        seq_length=config.data.seq_length,
        optimizer=optimizer,
        shard_group=shard_group,
        device=processes.device,
        stopwatch=stopwatch,
        display=display,
        trackers=trackers,
        stragglers=StragglerWatch(config.guard.straggler_factor, processes.activity),
        events=events,
        datasets=datasets,
        score_columns=score_columns,
        score_values=score_values,
        step_times=StepTimes(processes.device, stopwatch) if config.data.use_dummy_dataset else None,
    )


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
