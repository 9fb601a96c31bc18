"""The mean loss over the same held-out sequences each time: evaluations compare along a run and between runs.

A run that is told to end does not wait for an evaluation: it is left out, or broken off between two batches, and owed.
Whoever continues the run pays it first, with the same weights, so its losses are those of a run that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pretraining.data.batch import StepBatch
from pretraining.distributed.fsdp import reshard_model
from pretraining.progress import Interval, Progress, TrainState


class Evaluator:
    """Evaluates on an interval and at the end of the run.

    Args:
        model: returns (objective, valid tokens, z-loss in the objective), sums for a micro-batch's `ModelInputs`; the
            loss is the objective without the z-loss.
        open_batches: opens the held-out batches of one evaluation, from the first; None = never evaluate.
        device: of the model.
        interval: how often; the run's last step is always evaluated.
        activity: books the time of an evaluation.
        report: told of each result.
        told_to_end: asked between batches, by all ranks equally often; answers all of them alike.

    Attributes:
        owed: whether an evaluation of the present weights was due and has not come to its end.
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
        told_to_end: Callable[[], bool],
    ) -> None:
        self._model = model
        self._open_batches = open_batches
        self._device = device
        self._interval = interval
        self._activity = activity
        self._report = report
        self._told_to_end = told_to_end
        self.owed = False

    def maybe_run(self, state: TrainState) -> float | None:
        """The held-out loss (nats a token) if one is due after this step or owed, else None."""
        if self._open_batches is None or not (self.owed or state.finished or self._interval.is_due(state)):
            return None
        self.owed = True
        if state.preempted:
            return None
        with self._activity("evaluation"):
            loss = self._mean_loss(self._open_batches)
        if loss is not None:
            self.owed = False
            self._report(state.progress, loss)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What the next start has to know."""
        return {"owed": self.owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what an earlier start has left."""
        self.owed = self._open_batches is not None and bool(state["owed"])

    @torch.no_grad()
    def _mean_loss(self, open_batches: Callable[[], AbstractContextManager[Iterable[StepBatch]]]) -> float | None:
        """The loss, or None where the run was told to end meanwhile."""
        told_to_end = False
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)  # sum of losses, valid tokens
        with open_batches() as batches:
            for batch in batches:
                told_to_end = self._told_to_end()
                if told_to_end:
                    break
                for micro_batch in batch.micro_batches:
                    inputs = micro_batch.to(self._device, non_blocking=True).model_inputs()
                    objective_sum, valid_tokens, z_loss_sum = self._model(
                        inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS, inputs.document_lengths
                    )
                    totals += torch.stack([objective_sum.double() - z_loss_sum, valid_tokens.double()])
        reshard_model(self._model)
        if told_to_end:
            return None
        dist.all_reduce(totals)
        loss_sum, valid_tokens = totals.tolist()
        return loss_sum / valid_tokens
