"""How well tokens are predicted, told apart by dataset: in the reports of a training and in evaluations.

losses and hits of a micro-batch --`score`, on the device--> sums [datasets, 4] --all-reduce--> `Scores` of each
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch, send


class Scores(NamedTuple):
    """Sums over the labels that count.

    Attributes:
        loss_sum: of their cross-entropy, in nats.
        hits: of how many no token was likelier.
        tokens: how many there are.
        bytes: of the text that they stand for; 0 where that is not known.
    """

    loss_sum: float = 0.0
    hits: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0

    @staticmethod
    def total(scores: Iterable[Scores]) -> Scores:
        """Adds up: means over the sum weigh each token alike."""
        return Scores(*(sum(column) for column in zip(Scores(), *scores, strict=True)))

    @property
    def loss(self) -> float:
        """Nats a token; NaN where there is none."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity_of(self.loss)

    @property
    def token_accuracy(self) -> float:
        """Share of the tokens that are hits; NaN where there is none."""
        return self.hits / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of the text; None where its bytes are not known."""
        return self.loss_sum / math.log(2) / self.bytes if self.bytes else None


def score(
    tokens_BS2: Tensor, labels_BS: Tensor, micro_batch: MicroBatch, datasets: int, byte_lengths_V: Tensor | None = None
) -> Tensor:
    """Sums over a micro-batch, [datasets, fields of `Scores`] float64, without waiting for the device.

    Args:
        tokens_BS2: what stays of its tokens (`HeadLoss`).
        labels_BS: its labels.
        micro_batch: knows which dataset each row is of.
        datasets: how many there are.
        byte_lengths_V: of the text of each token; None = not known.
    """
    counted_BS = labels_BS != IGNORED_LABEL
    sums = [*tokens_BS2.unbind(2), counted_BS]
    if byte_lengths_V is not None:
        sums.append(byte_lengths_V[labels_BS.where(counted_BS, 0)] * counted_BS)
    sums_BF = torch.stack([each.sum(1, dtype=torch.float64) for each in sums], 1)
    sums_BF = F.pad(sums_BF, (0, len(Scores._fields) - len(sums)))
    numbers_B = (
        torch.zeros(len(sums_BF), dtype=torch.int64) if micro_batch.datasets_B is None else micro_batch.datasets_B
    )
    is_of_BN = send(numbers_B[:, None] == torch.arange(datasets), labels_BS.device)
    # Selected, not multiplied: a loss that is not finite stays with its dataset.
    return torch.where(is_of_BN[:, :, None], sums_BF[:, None], 0.0).sum(0)


def perplexity_of(loss: float) -> float:
    """Returns exp(loss); infinity where no float is as large."""
    return math.exp(loss) if not loss > 700 else math.inf


def format_perplexity(perplexity: float) -> str:
    """Writes two decimals, or of a huge one its size."""
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.1e}"
