"""Metrics of the user's own, beside the loss: a sum and a count of each, reported as their quotient.

    outputs and inputs of a micro-batch --the user's function, without gradients--> {name: (sum, count)}
        --added up on the device--> the observer's reports, over micro-batches, steps and ranks
                                    an evaluation, the same by set

The first call of a run learns the names, and that they are the same on every rank; nothing else here waits for the
device or for other processes.
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
"""Of each metric, by its name: sum and count, [2] float64 on the device."""


class Ratio(NamedTuple):
    """A metric, summed over all that it was measured on."""

    sum: float = 0.0
    counted: float = 0.0

    @staticmethod
    def total(ratios: Iterable[Ratio]) -> Ratio:
        """Add up."""
        return Ratio(*(sum(column) for column in zip(Ratio(), *ratios, strict=True)))

    @property
    def value(self) -> float:
        """Return the sum over the count; NaN where nothing was counted."""
        return self.sum / self.counted if self.counted else float("nan")


@dataclass(frozen=True)
class Outputs:
    """What the model has found for a micro-batch: on the device, without gradients. Logits are never kept.

    Attributes:
        loss_sum: cross-entropy in nats, summed over the labels that count (float32 scalar).
        valid_tokens: how many labels count (int64 scalar).
        losses: cross-entropy of each label, float32 [B, S]; 0 where it is ignored.
        hits: 1 where no token was likelier than the label, else 0, and 0 where it is ignored, float32 [B, S].
        hidden_states: what the final norm gives, [B, S, D] in the dtype of the computation; None unless asked for.
    """

    loss_sum: Tensor
    valid_tokens: Tensor
    losses: Tensor
    hits: Tensor
    hidden_states: Tensor | None = None


@dataclass(frozen=True)
class MetricsHook:
    """The user's function, and whether it looks at hidden states."""

    function: Callable[[Outputs, ModelInputs], Mapping[str, tuple[Tensor, Tensor]]]
    needs_hidden_states: bool = False


class CustomMetrics:
    """Calls the user's function for one model; without a hook it does nothing.

    Args:
        model: a Llama, as it is laid out.
        device: where sums and counts must be.

    Attributes:
        names: of the metrics, in the order in which they are sent between processes; none before the first call.
    """

    def __init__(
        self, hook: MetricsHook | None = None, model: nn.Module | None = None, device: torch.device | None = None
    ) -> None:
        self.names: tuple[str, ...] = ()
        self._hook, self._device = hook, device
        self._is_known = False
        self._hidden: Tensor | None = None
        if model is not None and hook is not None and hook.needs_hidden_states:
            model.get_submodule("model").register_forward_hook(self._keep)

    def _keep(self, decoder: nn.Module, arguments: Any, hidden_BSD: Tensor) -> None:
        self._hidden = hidden_BSD.detach()

    @torch.no_grad()
    def add(self, sums: Sums, outputs: HeadLoss, inputs: ModelInputs) -> None:
        """Add the metrics of a micro-batch to sums. The first call is a collective one.

        Raises:
            ConfigError: the function returns something else than scalars on the device, or other names than on another
                rank or before.
        """
        if self._hook is not None:
            self._add(self._hook, sums, self._outputs_of(outputs), inputs)

    @torch.no_grad()
    def add_by_set(self, sums: Sequence[Sums], outputs: HeadLoss, inputs: ModelInputs, micro_batch: MicroBatch) -> None:
        """Add the metrics of a micro-batch's rows to the sums of the sets that the rows are of, else as `add` does."""
        if self._hook is None:
            return
        whole, numbers_B = self._outputs_of(outputs), micro_batch.datasets_B
        numbers = [0] if numbers_B is None else numbers_B.tolist()
        for number in sorted(set(numbers)):
            part = whole, inputs
            if len(set(numbers)) > 1:
                part = _rows_of(whole, inputs, [row for row, each in enumerate(numbers) if each == number])
            self._add(self._hook, sums[number], *part)

    def _outputs_of(self, outputs: HeadLoss) -> Outputs:
        hidden, self._hidden = self._hidden, None
        losses_BS, hits_BS = outputs.tokens_BS2.detach().unbind(2)
        return Outputs(losses_BS.sum(), outputs.valid_tokens, losses_BS, hits_BS, hidden)

    def _add(self, hook: MetricsHook, sums: Sums, outputs: Outputs, inputs: ModelInputs) -> None:
        if self._is_known:
            try:
                measured = self._measure(hook, outputs, inputs)
                self._check_names(measured, "now")
            except ConfigError as error:
                error.rank = dist.get_rank()  # others do not know of it
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
                "return the same names each time, with a count of 0 if there is nothing to count"
            )

    def _measure(self, hook: MetricsHook, outputs: Outputs, inputs: ModelInputs) -> Sums:
        """Call the function; return its metrics in the order of their names."""
        found: Any = hook.function(outputs, inputs)
        if not isinstance(found, Mapping) or not all(isinstance(name, str) and name for name in found):
            raise ConfigError(f"extra_metrics returned {found!r:.200}: return a dict, {{name: (sum, count)}}")
        return {name: self._pair(name, found[name]) for name in sorted(found)}

    def _pair(self, name: str, value: Any) -> Tensor:
        def scalar(each: Any) -> Tensor:
            if isinstance(each, Tensor):
                return each.double()
            return torch.full((), each, dtype=torch.float64, device=self._device)

        with suppress(TypeError, ValueError, RuntimeError):  # no pair, no number, or on several devices
            pair = torch.stack([scalar(each) for each in value])
            if pair.shape == (2,) and pair.device == self._device:
                return pair
        raise ConfigError(
            f"extra_metrics: {name} is {value!r:.200}; give (sum, count), two scalar tensors on {self._device}, "
            "such as (values.sum(), outputs.valid_tokens)"
        )


NO_METRICS = CustomMetrics()


def _rows_of(outputs: Outputs, inputs: ModelInputs, rows: list[int]) -> tuple[Outputs, ModelInputs]:
    """Return some rows of a micro-batch, without waiting for the device."""
    tokens_BS, labels_BS, positions_BS, lengths = inputs
    places = send(torch.tensor(rows), tokens_BS.device)

    def some(rows_B: Tensor | None) -> Tensor | None:
        return None if rows_B is None else rows_B[places]

    labels_BS, losses_BS = labels_BS[places], outputs.losses[places]
    lengths = None if lengths is None else _lengths_of(lengths, rows, tokens_BS.size(1))
    return Outputs(
        loss_sum=losses_BS.sum(),
        valid_tokens=(labels_BS != IGNORED_LABEL).sum(),
        losses=losses_BS,
        hits=outputs.hits[places],
        hidden_states=some(outputs.hidden_states),
    ), ModelInputs(tokens_BS[places], labels_BS, some(positions_BS), lengths)


def _lengths_of(lengths: tuple[int, ...], rows: list[int], row_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents in some rows: no document crosses from one row to the next."""
    by_row: dict[int, list[int]] = {}
    place = 0
    for length in lengths:
        by_row.setdefault(place // row_tokens, []).append(length)
        place += length
    return tuple(length for row in rows for length in by_row[row])
