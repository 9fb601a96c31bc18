"""Metrics: what a run measures of the model's outputs, in training and in evaluations.

    outputs of a micro-batch --sums on the device--> [sets, columns] --all-reduce--> value of each metric

A metric is a number made of a sum and a count. Both are columns of a table, with a row per dataset or evaluation set;
tables are added up over micro-batches, steps and ranks. Three doors lead here:

    METRICS                 those of every run
    --extra_scores          user-defined classes, which sum over labels (docs/extending.md)
    Trainer.extra_metrics   a function that returns a sum and a count per name (docs/python.md)

The first call of a function compares its names on all ranks. Otherwise, nothing here waits for the device or for other
processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretraining.config.plugins import load_plugin, plugin_errors
from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch, ModelInputs, send
from pretraining.distributed.processes import gather_from_every_rank, on_every_rank
from pretraining.errors import ConfigError
from pretraining.model.loss import HeadLoss
from pretraining.observability.display import CUSTOM


@dataclass(frozen=True)
class PredictedTokens:
    """Labels of a micro-batch with the model's predictions, on the device.

    Attributes:
        losses_BS: cross-entropy of each label in nats; 0 for ignored labels.
        hits_BS: 1 if no token was likelier than the label, else 0; 0 for ignored labels.
        labels_BS: token ids; -100 = ignored.
    """

    losses_BS: Tensor
    hits_BS: Tensor
    labels_BS: Tensor


class Counts(NamedTuple):
    """Valid labels of a sum, and the bytes of their text; 0 bytes = unknown."""

    tokens: float
    bytes: float


class Score(Protocol):
    """Metric that sums over predicted tokens."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return what each label adds, [B, S], without waiting for the device; ignored labels do not count."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the value of a sum; NaN without tokens, None (not reported) if it is unknown."""


def mean(total: float, count: float) -> float:
    """Return a sum per count; NaN without a count."""
    return total / count if count else math.nan


def perplexity(total: float, count: float) -> float:
    """Return the exponential of the mean loss, or infinity on overflow."""
    loss = mean(total, count)
    return math.exp(loss) if not loss > 700 else math.inf


def bits_per_byte(total: float, count: float) -> float | None:
    """Return the bits per byte of a sum of losses; None if the bytes are unknown."""
    return total / math.log(2) / count if count else None


class Metric(NamedTuple):
    """A metric: the function of a sum and a count, and their columns."""

    value: Callable[[float, float], float | None]
    total: str
    counted: str = "tokens"


METRICS = {
    "loss": Metric(mean, "losses"),
    "perplexity": Metric(perplexity, "losses"),
    "token_accuracy": Metric(mean, "hits"),
    "bits_per_byte": Metric(bits_per_byte, "losses", "bytes"),
}
"""Metrics of every run."""
LABEL_COLUMNS = ("losses", "hits", "tokens", "bytes")
"""Columns of every run: sums over valid labels, their number, and the bytes of their text (0 = unknown)."""


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


class Metrics:
    """Metrics of a run, which measure the outputs of one model.

    Args:
        extra: user-defined scores, as package.module:Class.
        hook: user-defined function; None = none.
        model: a Llama, possibly sharded; only a hook needs it.

    Attributes:
        label_columns: those of every run, then one per user-defined score.
        pairs: columns of the sum and of the count, per name that the hook returns; empty before the first call.

    Raises:
        ConfigError: a user-defined score cannot be imported, or is no score.
    """

    def __init__(
        self, extra: Sequence[str] = (), hook: MetricsHook | None = None, model: nn.Module | None = None
    ) -> None:
        self._scores = {CUSTOM + path.rpartition(":")[2]: _load_user_score(path) for path in extra}
        if len(self._scores) < len(extra):
            raise ConfigError(f"--extra_scores={','.join(extra)} has two classes of one name: rename one of them")
        self.label_columns = (*LABEL_COLUMNS, *self._scores)
        self.pairs: dict[str, tuple[str, str]] = {}
        self._hook, self._is_known = hook, False
        self._hidden: Tensor | None = None
        if model is not None and hook is not None and hook.needs_hidden_states:
            model.get_submodule("model").register_forward_hook(self._capture)

    def _capture(self, decoder: nn.Module, arguments: Any, hidden_BSD: Tensor) -> None:
        self._hidden = hidden_BSD.detach()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; the first measurement adds those of the hook."""
        return (*self.label_columns, *(column for pair in self.pairs.values() for column in pair))

    @torch.no_grad()
    def measure(
        self,
        outputs: HeadLoss,
        inputs: ModelInputs,
        micro_batch: MicroBatch,
        sets: int,
        byte_lengths_V: Tensor | None = None,
        by_set: bool = False,
    ) -> Tensor:
        """Return the sums over a micro-batch, [sets, columns] float64; the first call of a hook is collective.

        Args:
            sets: number of datasets or evaluation sets.
            byte_lengths_V: text bytes of each token; None = unknown.
            by_set: whether the hook is called once per set; otherwise once, and its sums are those of the first set.

        Raises:
            ConfigError: the hook returns no pairs of scalars on the device, or names differ between ranks or calls.
        """
        labels_NC = self._sum_over_labels(outputs.tokens_BS2, inputs.labels_BS, byte_lengths_V)
        numbers_B = micro_batch.datasets_B
        if numbers_B is None:
            numbers_B = torch.zeros(len(labels_NC), dtype=torch.int64)
        is_of_BN = send(numbers_B[:, None] == torch.arange(sets), labels_NC.device)
        # `where`, not a product with the mask: a non-finite loss must stay in its dataset.
        table = torch.where(is_of_BN[:, :, None], labels_NC[:, None], 0.0).sum(0)
        if self._hook is None:
            return table
        parts = {0: (self._make_outputs(outputs), inputs)}
        if by_set:
            parts = _split_rows(*parts[0], numbers_B.tolist())
        rows = {number: self._call(self._hook, *part) for number, part in parts.items()}
        pairs = [rows.get(number, table.new_zeros(2 * len(self.pairs))) for number in range(sets)]
        return torch.cat((table, torch.stack(pairs)), 1)

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the value of each known metric by name, from sums in the order of `columns`."""
        totals = dict(zip(self.columns, sums, strict=True))
        counts = Counts(totals["tokens"], totals["bytes"])
        found = {name: metric.value(totals[metric.total], totals[metric.counted]) for name, metric in METRICS.items()}
        found |= {name: score.value(totals[name], counts) for name, score in self._scores.items()}
        found |= {CUSTOM + name: mean(totals[total], totals[count]) for name, (total, count) in self.pairs.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _sum_over_labels(self, tokens_BS2: Tensor, labels_BS: Tensor, byte_lengths_V: Tensor | None) -> Tensor:
        """Return the sums over the labels of each row, [B, label columns] float64."""
        losses_BS, hits_BS = tokens_BS2.unbind(2)
        counted_BS = labels_BS != IGNORED_LABEL
        bytes_BS = torch.zeros_like(counted_BS)
        if byte_lengths_V is not None:
            bytes_BS = byte_lengths_V[labels_BS.where(counted_BS, 0)] * counted_BS
        tokens = PredictedTokens(losses_BS, hits_BS, labels_BS)
        own = [score.sum(tokens).where(counted_BS, 0) for score in self._scores.values()]
        columns = [losses_BS.where(counted_BS, 0), hits_BS.where(counted_BS, 0), counted_BS, bytes_BS, *own]
        return torch.stack([column_BS.sum(1, dtype=torch.float64) for column_BS in columns], 1)

    def _make_outputs(self, outputs: HeadLoss) -> Outputs:
        hidden, self._hidden = self._hidden, None
        losses_BS, hits_BS = outputs.tokens_BS2.detach().unbind(2)
        return Outputs(losses_BS.sum(), outputs.valid_tokens, losses_BS, hits_BS, hidden)

    def _call(self, hook: MetricsHook, outputs: Outputs, inputs: ModelInputs) -> Tensor:
        """Call the hook, and return its sums and counts in the order of `pairs`, float64."""
        if self._is_known:
            try:
                found = _call_function(hook, outputs, inputs)
                self._check_names(found, "now")
            except ConfigError as error:
                error.rank = dist.get_rank()  # only this rank fails
                raise
        else:
            found = on_every_rank(lambda: _call_function(hook, outputs, inputs))
            everyone = gather_from_every_rank(lambda: tuple(found))
            self._is_known, self.pairs = True, {name: (f"sum of {name}", f"count of {name}") for name in everyone[0]}
            for rank, names in enumerate(everyone):
                self._check_names(names, f"on rank {rank}")
        return torch.cat([outputs.losses.new_zeros(0, dtype=torch.float64), *found.values()])

    def _check_names(self, names: Iterable[str], where: str) -> None:
        if tuple(names) != tuple(self.pairs):
            raise ConfigError(
                f"extra_metrics returned {', '.join(self.pairs)} on rank 0 first and {', '.join(names)} {where}: "
                "return the same names in every call, with a count of 0 if there is nothing to count"
            )


def _load_user_score(path: str) -> Score:
    """Build a user-defined score, and test it on two tokens, so that a mistake fails at the start."""
    score_class = load_plugin("extra_scores", path)
    zeros = torch.zeros(1, 2)
    with plugin_errors("extra_scores", path):
        score: Score = score_class()
        shape = score.sum(PredictedTokens(zeros, zeros, zeros.long())).shape
        score.value(0.0, Counts(0.0, 0.0))
    if shape != zeros.shape:
        raise ConfigError(f"--extra_scores={path}: `sum` returns the shape {tuple(shape)}, not that of labels_BS")
    return score


def _call_function(hook: MetricsHook, outputs: Outputs, inputs: ModelInputs) -> dict[str, Tensor]:
    """Call a user-defined function, and return its pairs, [2] float64 on the device, sorted by name."""
    found: Any = hook.function(outputs, inputs)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f"extra_metrics returned {found!r:.200}: return a dict, {{name: (sum, count)}}")
    return {name: _to_pair(name, found[name], outputs.losses.device) for name in sorted(found)}


def _to_pair(name: str, value: Any, device: torch.device) -> Tensor:
    def scalar(each: Any) -> Tensor:
        if isinstance(each, Tensor):
            return each.double()
        return torch.full((), each, dtype=torch.float64, device=device)

    with suppress(TypeError, ValueError, RuntimeError):  # no pair, no number, or several devices
        pair = torch.stack([scalar(each) for each in value])
        if pair.shape == (2,) and pair.device == device:
            return pair
    raise ConfigError(
        f"extra_metrics: {name} is {value!r:.200}; return (sum, count), two scalar tensors on {device}, "
        "such as (values.sum(), outputs.valid_tokens)"
    )


def _split_rows(outputs: Outputs, inputs: ModelInputs, numbers: list[int]) -> dict[int, tuple[Outputs, ModelInputs]]:
    """Return the rows of each set in a micro-batch, by its number, without waiting for the device."""
    sets = sorted(set(numbers))
    if len(sets) == 1:
        return {sets[0]: (outputs, inputs)}
    rows_of = {each: [row for row, number in enumerate(numbers) if number == each] for each in sets}
    return {each: _select_rows(outputs, inputs, rows) for each, rows in rows_of.items()}


def _select_rows(outputs: Outputs, inputs: ModelInputs, rows: list[int]) -> tuple[Outputs, ModelInputs]:
    tokens_BS, labels_BS, positions_BS, lengths, shared = inputs
    indices = send(torch.tensor(rows), tokens_BS.device)

    def select(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[indices]

    labels_BS, losses_BS = labels_BS[indices], outputs.losses[indices]
    lengths = None if lengths is None else _select_lengths(lengths, rows, tokens_BS.size(1))
    if shared is not None:
        shared = replace(shared, document_lengths=_select_lengths(shared.document_lengths, rows, shared.length))
    return Outputs(
        loss_sum=losses_BS.sum(),
        valid_tokens=(labels_BS != IGNORED_LABEL).sum(),
        losses=losses_BS,
        hits=outputs.hits[indices],
        hidden_states=select(outputs.hidden_states),
    ), ModelInputs(tokens_BS[indices], labels_BS, select(positions_BS), lengths, shared)


def _select_lengths(lengths: tuple[int, ...], rows: list[int], row_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the documents in some rows; no document crosses rows."""
    by_row: dict[int, list[int]] = {}
    position = 0
    for length in lengths:
        by_row.setdefault(position // row_tokens, []).append(length)
        position += length
    return tuple(length for row in rows for length in by_row[row])
