from __future__ import annotations

import math

import pytest
import torch

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch
from pretraining.model.loss import HeadLoss, head_loss
from pretraining.observability.scores import Scores, format_perplexity, score

LABELS = torch.tensor([[1, 2, IGNORED_LABEL], [3, 3, 0], [IGNORED_LABEL] * 3])
ROWS = MicroBatch(torch.zeros(3, 4, dtype=torch.int32), datasets_B=torch.tensor([1, 0, 1]))


def loss_of(labels: torch.Tensor) -> HeadLoss:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(*labels.shape, 8, generator=generator), torch.randn(4, 8, generator=generator)
    return head_loss(hidden, head, labels, chunk_tokens=2)


def test_scores_are_the_sums_over_the_labels_of_each_dataset() -> None:
    loss = loss_of(LABELS)
    sums = score(loss.tokens_BS2, LABELS, ROWS, 3, torch.tensor([0, 1, 2, 5]))
    of_tokens = loss.tokens_BS2.double()
    expected = [
        [float(of_tokens[1, :, 0].sum()), float(of_tokens[1, :, 1].sum()), 3, 10],
        [float(of_tokens[0, :2, 0].sum()), float(of_tokens[0, :2, 1].sum()), 2, 3],
        [0, 0, 0, 0],
    ]
    assert sums.tolist() == expected
    assert float(sums[:, 0].sum()) == pytest.approx(float(loss.objective_sum))
    loss.tokens_BS2[0, 0, 0] = math.nan  # which stays with its dataset
    sums = score(loss.tokens_BS2, LABELS, ROWS, 2)
    assert sums[0].isfinite().all() and math.isnan(sums[1, 0])


def test_rows_of_a_single_dataset_need_no_numbers_and_bytes_may_be_unknown() -> None:
    loss = loss_of(LABELS)
    sums = score(loss.tokens_BS2, LABELS, MicroBatch(ROWS.tokens_BT), 1)
    assert sums.shape == (1, 4) and sums[0, 2:].tolist() == [5, 0]
    assert Scores(*sums[0].tolist()).bits_per_byte is None


def test_means_over_a_total_weigh_each_token_alike() -> None:
    total = Scores.total([Scores(2.0, 1, 2, 4), Scores(8.0, 3, 8, 12)])
    assert total == Scores(10.0, 4, 10, 16)
    assert (total.loss, total.token_accuracy, total.perplexity) == (1.0, 0.4, math.e)
    assert total.bits_per_byte == pytest.approx(10 / 16 / math.log(2))
    assert math.isnan(Scores().loss) and math.isnan(Scores().token_accuracy) and Scores().bits_per_byte is None


def test_a_huge_perplexity_is_written_by_its_size() -> None:
    written = [format_perplexity(Scores(loss, 0, 1).perplexity) for loss in (0.0, 3.0, 214.0, 1e4)]
    assert written == ["1.00", "20.09", "8.7e+92", "inf"]
