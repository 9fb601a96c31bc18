"""The collector of a training run's numbers, from the model's outputs to a report.

    outputs of each micro-batch -> sums of the step -unless it is skipped-> sums of an interval -all-reduce-> report

The sums stay on the device, and the host waits for them in reports only. A checkpoint keeps those of its interval, so a
resume does not change the next reported loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pretraining.data.batch import MicroBatch, ModelInputs, send
from pretraining.distributed.grad_norm import gradient_norm, local_part
from pretraining.model.loss import HeadLoss
from pretraining.observability.metrics import LABEL_COLUMNS, Metrics, mean, perplexity
from pretraining.observability.step_outcome import StepOutcome

_NO_SUMS = {"steps": 0, "loss_sum": 0.0, "z_loss_sum": 0.0, "valid_tokens": 0, "skipped_updates": 0}


class Collector:
    """The collector of a run.

    Args:
        datasets: names of the datasets, in the order of `StepBatch.datasets`.
        optimizer: source of parameters and learning rates.
        shard_group: processes that shard one copy of the parameters.

    Attributes:
        lacks_labels: whether the last report had no label, though no update was skipped and no sample quarantined.
        reports_without_labels: number of finished intervals in a row without a label.
    """

    def __init__(
        self,
        metrics: Metrics,
        datasets: Sequence[str],
        optimizer: torch.optim.Optimizer,
        shard_group: dist.ProcessGroup,
    ) -> None:
        self.metrics = metrics
        self._datasets, self._optimizer, self._shard_group = datasets, optimizer, shard_group
        self._restored: Mapping[str, Any] = {}
        self._step: dict[str, Tensor] = {}
        self.lacks_labels, self.reports_without_labels = False, 0
        self.clear()

    def clear(self) -> None:
        """Begin a new interval."""
        self.reports_without_labels = self.reports_without_labels + 1 if self.lacks_labels else 0
        self._steps = 0
        # Sums of this rank, and sums of all ranks; float64. The first step creates them, when all columns are known.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._spans, self._micro_batches, self._unreadable = 0.0, 0, 0

    def add(self, outputs: HeadLoss, inputs: ModelInputs, micro_batch: MicroBatch) -> None:
        """Add the outputs of a micro-batch to the step; the first call is collective."""
        table = self.metrics.measure(outputs, inputs, micro_batch, len(self._datasets))
        _add(self._step, {"z_loss": outputs.z_loss_sum, "metrics": table})
        self._spans += inputs.attention_span
        self._unreadable += 0 if micro_batch.unreadable_B is None else int(micro_batch.unreadable_B.sum())
        self._micro_batches += 1

    def end_step(self, outcome: StepOutcome) -> None:
        """Add the step to the interval; a skipped step, whose sums may be NaN, only to the count of skipped steps."""
        if not self._sums:
            self._begin(outcome.skipped.device)

        def unless_skipped(value: Tensor) -> Tensor:
            return torch.where(outcome.skipped, 0.0, value.double())

        step = {"loss": outcome.loss_sum, **self._step}
        _add(self._sums, {name: unless_skipped(value) for name, value in step.items()})
        _add(self._counts, {"tokens": unless_skipped(outcome.valid_tokens), "skipped": outcome.skipped})
        self._steps += 1
        self._step = {}

    def report(self, outcome: StepOutcome) -> tuple[dict[str, float | None], float]:
        """Return the values of the interval by name, and the mean attention span; a collective call.

        Args:
            outcome: of the last step.
        """
        span = torch.full_like(outcome.loss_sum, self._spans / self._micro_batches, dtype=torch.float64)
        norms = {"grad_norm": outcome.grad_norm, "param_norm": self._parameter_norm()}
        unreadable = torch.full_like(span, self._unreadable)
        found = sum_over_ranks({**self._sums, "span": span, "unreadable": unreadable}, self._counts | norms)
        self.lacks_labels = not found["tokens"] and not found["unreadable"] and found["skipped"] < self._steps
        rows, tokens = found["metrics"], found["tokens"]
        values: dict[str, float | None] = {
            **self.metrics.values([sum(column) for column in zip(*rows, strict=True)]),
            "loss": mean(found["loss"], tokens),  # from the sum of the step; the table's differs in the last digits
            "perplexity": perplexity(found["loss"], tokens),
            "z_loss": mean(found["z_loss"], tokens),
            "learning_rate": outcome.learning_rate,
            "grad_norm": found["grad_norm"],
            "param_norm": found["param_norm"],
            "skipped_updates": int(found["skipped"]),
        }
        for index, group in enumerate(self._optimizer.param_groups):
            values[f"learning_rate_group_{index}"] = float(group["lr"])
        for name, row in zip(self._datasets, rows, strict=True):
            values[f"loss/{name}"] = self.metrics.values(row)["loss"]
        return values, found["span"] / dist.get_world_size()

    def _begin(self, device: torch.device) -> None:
        """Begin the sums at those of a checkpoint, or at zero; rank 0 gets those that are all-reduced."""
        state, self._restored = self._restored, {}
        own = state if dist.get_rank() == 0 else {}
        sums = {"loss": own.get("loss_sum", 0.0), "z_loss": own.get("z_loss_sum", 0.0), "metrics": self._table(own)}
        counts = {"tokens": state.get("valid_tokens", 0), "skipped": state.get("skipped_updates", 0)}
        self._sums, self._counts = (
            {name: send(torch.tensor(value, dtype=torch.float64), device) for name, value in part.items()}
            for part in (sums, counts)
        )

    def _table(self, state: Mapping[str, Any]) -> list[list[float]]:
        """Return a checkpoint's sums per dataset and column.

        They are zero if they are not finite or have no record; those of all labels also if their columns changed.
        """
        columns, pairs = list(self.metrics.label_columns), self.metrics.pairs
        is_same = state.get("score_columns", list(LABEL_COLUMNS)) == columns
        scores = state.get("scores", {}) if is_same else {}
        custom = [number for name in pairs for number in _numbers(state.get("custom", {}).get(name), 2)]
        rows = [_numbers(scores.get(name), len(columns)) for name in self._datasets]
        return [[*row, *(custom if index == 0 else [0.0] * len(custom))] for index, row in enumerate(rows)]

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all ranks in this interval, or {} without a step; collective after a step."""
        lacking = {"reports_without_labels": self.reports_without_labels} if self.reports_without_labels else {}
        if not self._sums:
            return {**_NO_SUMS, **self._restored, **lacking} if lacking else dict(self._restored)
        found = sum_over_ranks(self._sums, self._counts)
        columns, rows = self.metrics.label_columns, found["metrics"]
        custom = map(_finite, rows[0][len(columns) :])
        return {
            "steps": self._steps,
            "loss_sum": _finite(found["loss"]),
            "z_loss_sum": _finite(found["z_loss"]),
            "valid_tokens": int(found["tokens"]),
            "skipped_updates": int(found["skipped"]),
            "scores": {
                name: list(map(_finite, row[: len(columns)])) for name, row in zip(self._datasets, rows, strict=True)
            },
            "custom": {name: [next(custom), next(custom)] for name in self.metrics.pairs},
            **({} if columns == LABEL_COLUMNS else {"score_columns": list(columns)}),
            **lacking,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the interval of a checkpoint, unless its loss is not finite."""
        self.reports_without_labels = state.get("reports_without_labels", 0)
        if state["loss_sum"] is not None and state["z_loss_sum"] is not None:
            self._restored, self._steps = state, state["steps"]

    def _parameter_norm(self) -> Tensor:
        """Return the Euclidean norm of all parameters, a scalar on the device that is equal on every rank."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return gradient_norm([local_part(parameter.detach()) for parameter in parameters], self._shard_group)


def sum_over_ranks(sums: Mapping[str, Tensor], same: Mapping[str, Tensor] = MappingProxyType({})) -> dict[str, Any]:
    """All-reduce tensors, and return all as numbers or nested lists, by name; the host waits once.

    Args:
        sums: float64 tensors of this rank, with the same names and shapes on every rank.
        same: tensors that are equal on all ranks, and are not summed.
    """
    summed = torch.cat([each.flatten() for each in sums.values()])
    dist.all_reduce(summed)
    numbers = torch.cat((summed, *(each.double().flatten() for each in same.values()))).cpu()
    tensors = {**sums, **same}
    parts = numbers.split([tensor.numel() for tensor in tensors.values()])
    return {name: part.view(each.shape).tolist() for (name, each), part in zip(tensors.items(), parts, strict=True)}


def _add(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value


def _numbers(recorded: Sequence[float | None] | None, count: int) -> list[float]:
    """Return the numbers of a record, or zeros if there is none or one is not finite."""
    numbers = [each for each in recorded or () if each is not None]
    return numbers if len(numbers) == count else [0.0] * count


def _finite(value: float) -> float | None:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return value if math.isfinite(value) else None
