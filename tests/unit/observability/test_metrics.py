from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch, ModelInputs
from pretraining.errors import ConfigError
from pretraining.model.loss import HeadLoss, head_loss
from pretraining.observability.metrics import Metrics

LABELS = torch.tensor([[1, 2, IGNORED_LABEL], [3, 3, 0], [IGNORED_LABEL] * 3])
ROWS = MicroBatch(torch.zeros(3, 4, dtype=torch.int32), datasets_B=torch.tensor([1, 0, 1]))
METRICS = Metrics()
OWN = """
class Mine:
    def sum(self, tokens):
        return tokens.labels_BS + tokens.losses_BS * 0

    def value(self, total, counts):
        return total / counts.tokens if counts.tokens else None

class Inherited(Mine):
    def value(self, total, counts):
        return -total

class Flat(Mine):
    def sum(self, tokens):
        return tokens.labels_BS.sum()

class Divides(Mine):
    def value(self, total, counts):
        return total / counts.tokens
"""


def loss_of(labels: torch.Tensor) -> HeadLoss:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(*labels.shape, 8, generator=generator), torch.randn(4, 8, generator=generator)
    return head_loss(hidden, head, labels, chunk_tokens=2)


def inputs_of(labels: torch.Tensor) -> ModelInputs:
    return ModelInputs(labels, labels, None, None)


def test_sums_are_over_the_labels_of_each_dataset() -> None:
    loss = loss_of(LABELS)
    sums = METRICS.measure(loss, inputs_of(LABELS), ROWS, 3, torch.tensor([0, 1, 2, 5]))
    of_tokens = loss.tokens_BS2.double()
    expected = [
        [float(of_tokens[1, :, 0].sum()), float(of_tokens[1, :, 1].sum()), 3, 10],
        [float(of_tokens[0, :2, 0].sum()), float(of_tokens[0, :2, 1].sum()), 2, 3],
        [0, 0, 0, 0],
    ]
    assert sums.tolist() == expected
    assert float(sums[:, 0].sum()) == pytest.approx(float(loss.objective_sum))
    loss.tokens_BS2[0, 0, 0] = math.nan  # must stay in its dataset
    sums = METRICS.measure(loss, inputs_of(LABELS), ROWS, 2)
    assert sums[0].isfinite().all() and math.isnan(sums[1, 0])


def test_rows_of_a_single_dataset_need_no_numbers_and_bytes_may_be_unknown() -> None:
    loss = loss_of(LABELS)
    sums = METRICS.measure(loss, inputs_of(LABELS), MicroBatch(ROWS.tokens_BT), 1)
    assert sums.shape == (1, 4) and sums[0, 2:].tolist() == [5, 0]
    assert list(METRICS.values(sums[0].tolist())) == ["loss", "perplexity", "token_accuracy"]


def test_values_are_means_over_tokens_or_bytes() -> None:
    values = METRICS.values([10.0, 4, 10, 16])
    assert values == {"loss": 1.0, "perplexity": math.e, "token_accuracy": 0.4, "bits_per_byte": 10 / math.log(2) / 16}
    nothing = METRICS.values([0.0, 0, 0, 0])
    assert list(nothing) == ["loss", "perplexity", "token_accuracy"] and all(map(math.isnan, nothing.values()))
    assert METRICS.values([1e5, 0, 1, 0])["perplexity"] == math.inf


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scores_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("outside")
def test_a_user_defined_score_has_a_column_and_ignored_labels_do_not_count() -> None:
    scores = Metrics(["scores_of_mine:Mine", "scores_of_mine:Inherited"])
    assert scores.columns == ("losses", "hits", "tokens", "bytes", "custom/Mine", "custom/Inherited")
    sums = scores.measure(loss_of(LABELS), inputs_of(LABELS), ROWS, 2)
    assert sums[:, 4].tolist() == [6, 3]
    values = scores.values(sums[0].tolist())
    assert (values["custom/Mine"], values["custom/Inherited"]) == (2.0, -6.0)
    assert "custom/Mine" not in scores.values([0.0] * 6)  # None is not reported


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    "names", [["Flat"], ["Divides"], ["Mine", "Mine"], ["Missing"]], ids=["no [B, S]", "no token", "twice", "missing"]
)
def test_what_is_no_score_is_refused_at_the_start(names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Metrics([f"scores_of_mine:{name}" for name in names])
    assert refused.value.settings == ("extra_scores",)
