"""The mean loss over the same held-out sequences each time: evaluations compare along a run and between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from pretraining.config.durations import Progress
from pretraining.config.intervals import Interval, RunState
from pretraining.data.batch import StepBatch
from pretraining.parallel.sharding import reshard_model


class Evaluator:
    """Evaluates on an interval and at the end of the run.

    Args:
        model: returns the sum of losses and the number of valid tokens for a micro-batch's `ModelInputs`.
        open_batches: opens the held-out batches of one evaluation, from the first; None = never evaluate.
        device: of the model.
        interval: how often; the run's last step is always evaluated.
        activity: books the time of an evaluation.
        report: told of each result.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]] | None,
        device: torch.device,
        interval: Interval,
        activity: Callable[[str], AbstractContextManager[None]],
        report: Callable[[Progress, float], None],
    ) -> None:
        self._model = model
        self._open_batches = open_batches
        self._device = device
        self._interval = interval
        self._activity = activity
        self._report = report

    def maybe_run(self, state: RunState) -> float | None:
        """The held-out loss (nats a token) if one is due after this step, else None."""
        if self._open_batches is None or not (state.finished or self._interval.is_due(state)):
            return None
        with self._activity("evaluation"):
            loss = self._mean_loss(self._open_batches)
        self._report(state.progress, loss)
        return loss

    @torch.no_grad()
    def _mean_loss(self, open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]]) -> float:
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)  # sum of losses, valid tokens
        with open_batches() as batches:
            for batch in batches:
                for micro_batch in batch.micro_batches:
                    inputs = micro_batch.to(self._device, non_blocking=True).model_inputs()
                    loss_sum, valid_tokens = self._model(
                        inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS, inputs.document_lengths
                    )
                    totals += torch.stack([loss_sum.double(), valid_tokens.double()])
        reshard_model(self._model)
        dist.all_reduce(totals)
        loss_sum, valid_tokens = totals.tolist()
        return loss_sum / valid_tokens
