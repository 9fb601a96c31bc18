"""Collects what steps leave behind and reports it when a report is due.

Between reports everything stays on the device: adding to running sums needs no answer from it. A report is the one
place where the host waits: one all-reduce of the sums, one of the peaks of memory, and the numbers go to the display
and the trackers of rank 0.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pretraining.observability.display import ProgressDisplay, Report
from pretraining.observability.stragglers import StragglerWatch
from pretraining.observability.throughput import Stopwatch
from pretraining.observability.trackers import Tracker
from pretraining.progress import Interval, Progress, TrainState

GIB = 1024.0**3


class Outcome(Protocol):
    """What a training step leaves behind; tensors are scalars on the device."""

    @property
    def loss_sum(self) -> torch.Tensor:
        """Sum of the losses of this rank's valid tokens."""

    @property
    def z_loss_sum(self) -> torch.Tensor:
        """Sum of their z-losses, which are no part of the losses."""

    @property
    def valid_tokens(self) -> torch.Tensor:
        """Valid tokens of the global batch."""

    @property
    def grad_norm(self) -> torch.Tensor:
        """Norm of the gradient before clipping, the same on all ranks."""

    @property
    def skipped(self) -> torch.Tensor:
        """Whether the update was left out, the same on all ranks."""

    @property
    def learning_rate(self) -> float:
        """Of the update."""

    @property
    def attention_span(self) -> float:
        """Tokens of the document or row that a token of this rank is in, on average."""


class Observer:
    """Reports of a run.

    Args:
        interval: how often to report; where an invocation ends is always reported.
        total_steps: of the run, for the time left.
        flops_per_token: of the model, forward and backward, for the tokens that attention spans on average.
        recomputed_flops_per_token: what the device does beside, for the same tokens.
        peak_tflops: of a device, or None where it is not known.
        device: of the step's tensors.
        stopwatch: shared with whoever spends time on something else than training.
        display: where reports are shown; other ranks than 0 have one that shows nothing.
        trackers: where reports are kept; other ranks have none.
        stragglers: tells which processes the others wait for.
        last_loss: the newest one reported by an earlier invocation.
    """

    def __init__(
        self,
        *,
        interval: Interval,
        total_steps: int,
        flops_per_token: Callable[[float], float],
        recomputed_flops_per_token: Callable[[float], float] = lambda attention_span: 0.0,
        peak_tflops: float | None,
        device: torch.device,
        stopwatch: Stopwatch,
        display: ProgressDisplay,
        trackers: list[Tracker],
        stragglers: StragglerWatch,
        last_loss: float | None = None,
    ) -> None:
        self._interval = interval
        self._total_steps = total_steps
        self._flops_per_token = flops_per_token
        self._recomputed_flops_per_token = recomputed_flops_per_token
        self._peak_tflops = peak_tflops
        self._device = device
        self._stopwatch = stopwatch
        self._display = display
        self._trackers = trackers
        self._stragglers = stragglers
        self._start: Progress | None = None  # of this process, for the overall rate
        self._reported: Progress | None = None
        self._clear_sums()
        self.last_loss = last_loss

    def __enter__(self) -> Observer:
        self._display.open()
        self._stopwatch.restart()  # what went before was setting up, not training
        self._stragglers.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stragglers.stop()
        self._display.close()
        for tracker in self._trackers:
            tracker.close()

    def after_step(self, state: TrainState, outcome: Outcome) -> None:
        """Take note of a step; report if a boundary of the interval was crossed, or the invocation is over."""
        if self._start is None or self._reported is None:
            self._start = self._reported = state.before
        kept = ~outcome.skipped
        # A skipped step's loss may be NaN: it must not spoil the mean of the others.
        self._loss_sum += torch.where(kept, outcome.loss_sum, 0.0)
        self._z_loss_sum += torch.where(kept, outcome.z_loss_sum, 0.0)
        self._valid_tokens += torch.where(kept, outcome.valid_tokens, 0)
        self._skipped += outcome.skipped
        self._attention_spans += outcome.attention_span
        if state.stopping or self._interval.is_due(state):
            self._report(state.progress, outcome)

    def after_evaluation(self, progress: Progress, loss: float) -> None:
        """Show and keep the loss of an evaluation."""
        perplexity = math.exp(min(loss, 100.0))
        self._display.note(f"step {progress.steps}  evaluation_loss {loss:.4f}  perplexity {perplexity:.2f}")
        for tracker in self._trackers:
            tracker.log(progress.steps, {"tokens_seen": progress.tokens, "evaluation_loss": _finite(loss)})

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._display.note(text)

    def _clear_sums(self) -> None:
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._z_loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._valid_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._device)
        self._attention_spans = 0.0

    def _report(self, now: Progress, outcome: Outcome) -> None:
        assert self._start is not None and self._reported is not None
        spans = torch.full_like(self._loss_sum, self._attention_spans)
        sums = torch.stack((self._loss_sum, self._z_loss_sum, spans))
        dist.all_reduce(sums)
        loss_sum, z_loss_sum, attention_spans = sums.tolist()
        valid_tokens, skipped, grad_norm = (
            value.item() for value in (self._valid_tokens, self._skipped, outcome.grad_norm)
        )
        memory = self._memory_of_the_fullest_rank()
        seconds, spent = self._stopwatch.lap()  # after `.item()`: the device has finished the steps
        steps = now.steps - self._reported.steps
        gpus = dist.get_world_size()
        rate = (now.tokens - self._reported.tokens) / seconds
        overall_rate = (now.tokens - self._start.tokens) / self._stopwatch.overall_training_seconds
        tokens_per_step = (now.tokens - self._reported.tokens) / steps
        span = attention_spans / (steps * gpus)
        model_tflops = self._flops_per_token(span) * rate / gpus / 1e12
        tflops = model_tflops + self._recomputed_flops_per_token(span) * rate / gpus / 1e12
        report = Report(
            step=now.steps,
            tokens_seen=now.tokens,
            loss=loss_sum / valid_tokens if valid_tokens else math.nan,
            z_loss=z_loss_sum / valid_tokens if valid_tokens else math.nan,
            learning_rate=outcome.learning_rate,
            grad_norm=grad_norm,
            skipped_updates=int(skipped),
            step_seconds=seconds / steps,
            tokens_per_second_per_gpu=rate / gpus,
            tokens_per_second_per_gpu_overall=overall_rate / gpus,
            tokens_per_day=overall_rate * 86400,
            mfu=None if self._peak_tflops is None else model_tflops / self._peak_tflops,
            hfu=None if self._peak_tflops is None else tflops / self._peak_tflops,
            data_share=spent.get("data", 0.0) / seconds,
            memory_gib=memory[0],
            memory_allocated_gib=memory[1] if self._device.type == "cuda" else None,
            memory_reserved_gib=memory[2] if self._device.type == "cuda" else None,
            time_left_seconds=(self._total_steps - now.steps) * tokens_per_step / overall_rate,
        )
        self.last_loss = _finite(report.loss)
        self._display.show(report)
        for line in self._stragglers.report(report.step_seconds):
            self._display.note(line)
        values = {name: _finite(value) for name, value in asdict(report).items() if name != "step"}
        for tracker in self._trackers:
            tracker.log(report.step, values)
        self._reported = now
        self._clear_sums()

    def _memory_of_the_fullest_rank(self) -> list[float]:
        """GiB: the peak in use, what is allocated now, what the allocator has reserved; on a CPU the process's peak."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            sizes = [peak, torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)]
        else:
            unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
            sizes = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0, 0]
        maxima = torch.tensor(sizes, dtype=torch.float64)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return [size / GIB for size in maxima.tolist()]


def _finite(value: Any) -> Any:
    """JSON knows no NaN or infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
