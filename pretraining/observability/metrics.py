"""Scores of predicted tokens, per dataset, for training reports and evaluations.

    micro-batch --sums on the device--> [datasets, columns] --all-reduce--> value of each score

A score is a class with two methods: what each label adds to a sum, and the value of the sum. `SCORES` in
config/plugins.py lists the scores of every run; `--extra_scores` adds user-defined ones (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pretraining.config.plugins import SCORES, load_plugin, plugin_errors
from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch, send
from pretraining.errors import ConfigError
from pretraining.observability.display import CUSTOM, perplexity_of


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
    """Score of predicted tokens, computed from a sum over them."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return what each label adds, [B, S], without waiting for the device; ignored labels do not count."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the value of a sum; NaN without tokens, None (not reported) if it is unknown."""


class Loss:
    """Cross-entropy in nats per token."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return losses [B, S]."""
        return tokens.losses_BS

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the mean loss."""
        return total / counts.tokens if counts.tokens else math.nan


class Perplexity(Loss):
    """Exponential of the loss."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the exponential of the mean loss."""
        return perplexity_of(total / counts.tokens) if counts.tokens else math.nan


class TokenAccuracy(Loss):
    """Share of tokens that the model predicts as the likeliest."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return hits [B, S]."""
        return tokens.hits_BS


class BitsPerByte(Loss):
    """Bits per byte of the text."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the bits per byte; None if the bytes are unknown."""
        return total / math.log(2) / counts.bytes if counts.bytes else None


class Scores:
    """Scores of a run.

    Args:
        extra: user-defined scores, as package.module:Class.

    Attributes:
        columns: names of the sums: losses, hits, tokens, bytes, then those of other scores.

    Raises:
        ConfigError: a user-defined score cannot be imported, or is no score.
    """

    def __init__(self, extra: Sequence[str] = ()) -> None:
        self._by_name: dict[str, Score] = {name: load_plugin("table", path)() for name, path in SCORES.items()}
        for path in extra:
            name = CUSTOM + path.rpartition(":")[2]
            if name in self._by_name:
                raise ConfigError(f"--extra_scores={','.join(extra)} has two classes of one name: rename one of them")
            self._by_name[name] = _load_user_score(path)
        # Scores that inherit `sum` share its column.
        self._sums: dict[Callable[..., Tensor], str] = {Loss.sum: "losses", TokenAccuracy.sum: "hits"}
        for name, score in self._by_name.items():
            self._sums.setdefault(type(score).sum, name)
        losses, hits, *others = self._sums.values()
        self.columns = (losses, hits, "tokens", "bytes", *others)

    def measure(
        self,
        tokens_BS2: Tensor,
        labels_BS: Tensor,
        micro_batch: MicroBatch,
        datasets: int,
        byte_lengths_V: Tensor | None = None,
    ) -> Tensor:
        """Return the sums over a micro-batch, [datasets, columns] float64, without waiting for the device.

        Args:
            tokens_BS2: loss and hit of each token (`HeadLoss`).
            datasets: number of datasets.
            byte_lengths_V: text bytes of each token; None = unknown.
        """
        losses_BS, hits_BS = tokens_BS2.unbind(2)
        tokens = PredictedTokens(losses_BS, hits_BS, labels_BS)
        counted_BS = labels_BS != IGNORED_LABEL
        by_column = {"tokens": counted_BS, "bytes": torch.zeros_like(counted_BS)}
        if byte_lengths_V is not None:
            by_column["bytes"] = byte_lengths_V[labels_BS.where(counted_BS, 0)] * counted_BS
        for score in self._by_name.values():
            column = self._sums[type(score).sum]
            if column not in by_column:
                by_column[column] = score.sum(tokens).where(counted_BS, 0)
        sums_BF = torch.stack([by_column[name].sum(1, dtype=torch.float64) for name in self.columns], 1)
        numbers_B = micro_batch.datasets_B
        if numbers_B is None:
            numbers_B = torch.zeros(len(sums_BF), dtype=torch.int64)
        is_of_BN = send(numbers_B[:, None] == torch.arange(datasets), labels_BS.device)
        # `where`, not a product with the mask: a non-finite loss must stay in its dataset.
        return torch.where(is_of_BN[:, :, None], sums_BF[:, None], 0.0).sum(0)

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the value of each known score by name, from sums in the order of `columns`."""
        by_column = dict(zip(self.columns, sums, strict=True))
        counts = Counts(by_column["tokens"], by_column["bytes"])
        found = {
            name: score.value(by_column[self._sums[type(score).sum]], counts) for name, score in self._by_name.items()
        }
        return {name: value for name, value in found.items() if value is not None}


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
