"""How well tokens are predicted: a number per score, told apart by dataset, in training reports and in evaluations.

    a micro-batch --sum of each score, on the device--> [datasets, columns] --all-reduce--> value of each score

A score is a class: what each label adds, and what the sum comes to. Those of every run are the rows of `SCORES` in
config/plugins.py; `--extra_scores` names a user's own (docs/extending.md).
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
    """The labels of a micro-batch and how well the model predicts them, on the device.

    Attributes:
        losses_BS: cross-entropy of each label in nats; 0 where it is ignored.
        hits_BS: 1 where no token was likelier than the label, else 0, and 0 where it is ignored.
        labels_BS: token ids; -100 = ignored.
    """

    losses_BS: Tensor
    hits_BS: Tensor
    labels_BS: Tensor


class Counts(NamedTuple):
    """What a sum is over: labels that count, and bytes of the text that they stand for, 0 if that is not known."""

    tokens: float
    bytes: float


class Score(Protocol):
    """A number about predicted tokens, made of a sum over them."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return what each label adds, [B, S], without waiting for the device; ignored labels are left out."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return what a sum comes to: NaN without a token, None if it is not known, and then not reported."""


class Loss:
    """Cross-entropy in nats per token."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return losses [B, S]."""
        return tokens.losses_BS

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the mean."""
        return total / counts.tokens if counts.tokens else math.nan


class Perplexity(Loss):
    """The exponential of the loss."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return exp(mean)."""
        return perplexity_of(total / counts.tokens) if counts.tokens else math.nan


class TokenAccuracy(Loss):
    """Share of the tokens that are the likeliest one."""

    def sum(self, tokens: PredictedTokens) -> Tensor:
        """Return hits [B, S]."""
        return tokens.hits_BS


class BitsPerByte(Loss):
    """Bits that the model needs for a byte of the text."""

    def value(self, total: float, counts: Counts) -> float | None:
        """Return the quotient; None without the bytes of tokens."""
        return total / math.log(2) / counts.bytes if counts.bytes else None


class Scores:
    """The scores of a run.

    Args:
        own: of the user's, as package.module:Class.

    Attributes:
        columns: names of the sums: losses, hits, tokens, bytes, then those of other scores.

    Raises:
        ConfigError: a user's own cannot be found, or is no score.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._by_name: dict[str, Score] = {name: load_plugin("table", path)() for name, path in SCORES.items()}
        for path in own:
            name = CUSTOM + path.rpartition(":")[2]
            if name in self._by_name:
                raise ConfigError(f"--extra_scores={','.join(own)} names two of one name: rename one of the classes")
            self._by_name[name] = _load_own_score(path)
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
            tokens_BS2: what the loss keeps of each token (`HeadLoss`).
            labels_BS: its labels.
            micro_batch: knows the dataset of each row.
            datasets: how many there are.
            byte_lengths_V: of the text of each token; None = not known.
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
        # Selected, not multiplied: a loss that is not finite stays with its dataset.
        return torch.where(is_of_BN[:, :, None], sums_BF[:, None], 0.0).sum(0)

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the value of each score that is known, by name, of sums in the order of `columns`."""
        by_column = dict(zip(self.columns, sums, strict=True))
        counts = Counts(by_column["tokens"], by_column["bytes"])
        found = {
            name: score.value(by_column[self._sums[type(score).sum]], counts) for name, score in self._by_name.items()
        }
        return {name: value for name, value in found.items() if value is not None}


def _load_own_score(path: str) -> Score:
    """Make a user's own score, and try it on two tokens: a mistake should not cost a run."""
    score_class = load_plugin("extra_scores", path)
    zeros = torch.zeros(1, 2)
    with plugin_errors("extra_scores", path):
        score: Score = score_class()
        shape = score.sum(PredictedTokens(zeros, zeros, zeros.long())).shape
        score.value(0.0, Counts(0.0, 0.0))
    if shape != zeros.shape:
        raise ConfigError(f"--extra_scores={path}: `sum` returns the shape {tuple(shape)}; return one of labels_BS")
    return score
