"""User-defined metrics beside the loss: each is a sum and a count, reported as their quotient.

    outputs and inputs of a micro-batch --user function, without gradients--> {name: (sum, count)}
        --summed on the device--> reports, over micro-batches, steps and ranks
                                  evaluations, per set

The first call compares the names on all ranks. Later calls wait neither for the device nor for other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch, ModelInputs, send
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank
from pretraining.errors import ConfigError
from pretraining.model.loss import HeadLoss

Sums = dict[str, Tensor]
"""Sum and count per metric, [2] float64 on the device, by name."""


class Ratio(NamedTuple):
    """A metric as a sum and a count."""

    sum: float = 0.0
    counted: float = 0.0

    @staticmethod
    def total(ratios: Iterable[Ratio]) -> Ratio:
        """Return the sum of ratios' parts."""
        return Ratio(*(sum(column) for column in zip(Ratio(), *ratios, strict=True)))

    @property
    def value(self) -> float:
        """The sum over the count; NaN for a count of 0."""
        return self.sum / self.counted if self.counted else float("nan")


@dataclass(frozen=True)
class Outputs:
    """Outputs of the model for a micro-batch, on the device, without gradients. There are no logits.

    Attributes:
        loss_sum: cross-entropy in nats, summed over valid labels (float32 scalar).
        valid_tokens: number of valid labels (int64 scalar).
        losses: cross-entropy of each label, float32 [B, S]; 0 for ignored labels.
        hits: 1 for a top-1 hit, else 0, float32 [B, S]; 0 for ignored labels.
        hidden_states: output of the final norm, [B, S, D] in the compute dtype; None unless requested.
    """

    loss_sum: Tensor
    valid_tokens: Tensor
    losses: Tensor
    hits: Tensor
    hidden_states: Tensor | None = None


@dataclass(frozen=True)
class MetricsHook:
    """A user-defined metrics function, and whether it needs hidden states."""

    function: Callable[[Outputs, ModelInputs], Mapping[str, tuple[Tensor, Tensor]]]
    needs_hidden_states: bool = False


class CustomMetrics:
    """The caller of a user-defined function for one model; it does nothing without a hook.

    Args:
        model: a Llama, possibly sharded.
        device: device of sums and counts.

    Attributes:
        names: sorted names of the metrics; empty before the first call.
    """

    def __init__(
        self, hook: MetricsHook | None = None, model: nn.Module | None = None, device: torch.device | None = None
    ) -> None:
        self.names: tuple[str, ...] = ()
        self._hook, self._device = hook, device
        self._is_known = False
        self._hidden: Tensor | None = None
        if model is not None and hook is not None and hook.needs_hidden_states:
            model.get_submodule("model").register_forward_hook(self._capture)

    def _capture(self, decoder: nn.Module, arguments: Any, hidden_BSD: Tensor) -> None:
        self._hidden = hidden_BSD.detach()

    @torch.no_grad()
    def add(self, sums: Sums, outputs: HeadLoss, inputs: ModelInputs) -> None:
        """Add the metrics of a micro-batch to sums; the first call is collective.

        Raises:
            ConfigError: the function returns no pairs of scalars on the device, or names differ between ranks or calls.
        """
        if self._hook is not None:
            self._add(self._hook, sums, self._make_outputs(outputs), inputs)

    @torch.no_grad()
    def add_by_set(self, sums: Sequence[Sums], outputs: HeadLoss, inputs: ModelInputs, micro_batch: MicroBatch) -> None:
        """Add the metrics of a micro-batch's rows to the sums of the rows' sets; otherwise as `add`."""
        if self._hook is None:
            return
        whole, numbers_B = self._make_outputs(outputs), micro_batch.datasets_B
        numbers = [0] if numbers_B is None else numbers_B.tolist()
        for number in sorted(set(numbers)):
            part = whole, inputs
            if len(set(numbers)) > 1:
                part = _select_rows(whole, inputs, [row for row, each in enumerate(numbers) if each == number])
            self._add(self._hook, sums[number], *part)

    def _make_outputs(self, outputs: HeadLoss) -> Outputs:
        hidden, self._hidden = self._hidden, None
        losses_BS, hits_BS = outputs.tokens_BS2.detach().unbind(2)
        return Outputs(losses_BS.sum(), outputs.valid_tokens, losses_BS, hits_BS, hidden)

    def _add(self, hook: MetricsHook, sums: Sums, outputs: Outputs, inputs: ModelInputs) -> None:
        if self._is_known:
            try:
                measured = self._measure(hook, outputs, inputs)
                self._check_names(measured, "now")
            except ConfigError as error:
                error.rank = dist.get_rank()  # only this rank fails
                raise
        else:
            measured = on_every_rank(lambda: self._measure(hook, outputs, inputs))
            everyone = gather_from_every_rank(lambda: tuple(measured))
            self.names, self._is_known = everyone[0], True
            for rank, names in enumerate(everyone):
                self._check_names(names, f"on rank {rank}")
        for name, pair in measured.items():
            sums[name] = sums[name] + pair if name in sums else pair

    def _check_names(self, names: Iterable[str], where: str) -> None:
        if tuple(names) != self.names:
            raise ConfigError(
                f"extra_metrics returned {', '.join(self.names)} on rank 0 first and {', '.join(names)} {where}: "
                "return the same names in every call, with a count of 0 if there is nothing to count"
            )

    def _measure(self, hook: MetricsHook, outputs: Outputs, inputs: ModelInputs) -> Sums:
        """Call the function, and return its metrics sorted by name."""
        found: Any = hook.function(outputs, inputs)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) and name for name in found):
            raise ConfigError(f"extra_metrics returned {found!r:.200}: return a dict, {{name: (sum, count)}}")
        return {name: self._to_tensor(name, found[name]) for name in sorted(found)}

    def _to_tensor(self, name: str, value: Any) -> Tensor:
        def scalar(each: Any) -> Tensor:
            if isinstance(each, Tensor):
                return each.double()
            return torch.full((), each, dtype=torch.float64, device=self._device)

        with suppress(TypeError, ValueError, RuntimeError):  # no pair, no number, or several devices
            pair = torch.stack([scalar(each) for each in value])
            if pair.shape == (2,) and pair.device == self._device:
                return pair
        raise ConfigError(
            f"extra_metrics: {name} is {value!r:.200}; return (sum, count), two scalar tensors on {self._device}, "
            "such as (values.sum(), outputs.valid_tokens)"
        )


NO_METRICS = CustomMetrics()


def _select_rows(outputs: Outputs, inputs: ModelInputs, rows: list[int]) -> tuple[Outputs, ModelInputs]:
    """Return some rows of a micro-batch, without waiting for the device."""
    tokens_BS, labels_BS, positions_BS, lengths = inputs
    indices = send(torch.tensor(rows), tokens_BS.device)

    def select(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[indices]

    labels_BS, losses_BS = labels_BS[indices], outputs.losses[indices]
    lengths = None if lengths is None else _select_lengths(lengths, rows, tokens_BS.size(1))
    return Outputs(
        loss_sum=losses_BS.sum(),
        valid_tokens=(labels_BS != IGNORED_LABEL).sum(),
        losses=losses_BS,
        hits=outputs.hits[indices],
        hidden_states=select(outputs.hidden_states),
    ), ModelInputs(tokens_BS[indices], labels_BS, select(positions_BS), lengths)


def _select_lengths(lengths: tuple[int, ...], rows: list[int], row_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents in some rows; no document crosses rows."""
    by_row: dict[int, list[int]] = {}
    position = 0
    for length in lengths:
        by_row.setdefault(position // row_tokens, []).append(length)
        position += length
    return tuple(length for row in rows for length in by_row[row])
