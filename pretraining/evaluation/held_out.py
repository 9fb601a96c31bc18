"""The mean loss over the same held-out sequences each time: evaluations compare along a run and between runs.

A run that is to stop does not wait for an evaluation: it is left out, or broken off between two batches, and stays
pending. The next start evaluates first, with the same weights, so its losses are those of a run that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pretraining.data.batch import StepBatch
from pretraining.distributed.fsdp import reshard_model
from pretraining.observability.observer import Observer
from pretraining.observability.throughput import Stopwatch
from pretraining.progress import Interval, TrainState

PENDING_KEY = "owed"  # in checkpoints


@dataclass
class Evaluator:
    """Evaluates on an interval and at the end of the run.

    Attributes:
        model: returns (objective, valid tokens, z-loss in the objective), sums for a micro-batch's `ModelInputs`; the
            loss is the objective without the z-loss.
        open_batches: opens the held-out batches of one evaluation, from the first; None = never evaluate.
        interval: how often; the run's last step is always evaluated.
        should_stop: asked between batches by all ranks, which all get the same answer.
        pending: whether an evaluation of the present weights is due and not done.
    """

    model: nn.Module
    open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]] | None
    device: torch.device
    interval: Interval
    stopwatch: Stopwatch
    observer: Observer
    should_stop: Callable[[], bool]
    pending: bool = False

    def maybe_run(self, state: TrainState) -> float | None:
        """Evaluates if it is due after this step, or pending; returns the held-out loss in nats a token, else None."""
        if self.open_batches is None or not (self.pending or state.finished or self.interval.is_due(state)):
            return None
        self.pending = True
        if state.preempted:
            return None
        with self.stopwatch.measure("evaluation"):
            loss = self._mean_loss(self.open_batches)
        if loss is not None:
            self.pending = False
            self.observer.after_evaluation(state.progress, loss)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-able."""
        return {PENDING_KEY: self.pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint kept."""
        self.pending = self.open_batches is not None and bool(state[PENDING_KEY])

    @torch.no_grad()
    def _mean_loss(self, open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]]) -> float | None:
        """The loss, or None where the run is to stop meanwhile."""
        stopped = False
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # sum of losses, valid tokens
        with open_batches() as batches:
            for batch in batches:
                stopped = self.should_stop()
                if stopped:
                    break
                for micro_batch in batch.micro_batches:
                    inputs = micro_batch.to(self.device, non_blocking=True).model_inputs()
                    objective_sum, valid_tokens, z_loss_sum = self.model(
                        inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS, inputs.document_lengths
                    )
                    totals += torch.stack([objective_sum.double() - z_loss_sum, valid_tokens.double()])
        reshard_model(self.model)
        if stopped:
            return None
        dist.all_reduce(totals)
        loss_sum, valid_tokens = totals.tolist()
        return float(loss_sum / valid_tokens)
