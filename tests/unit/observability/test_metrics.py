from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pretraining.config.training import IGNORED_LABEL
from pretraining.context_group import ContextGroup
from pretraining.data.batch import MicroBatch, ModelInputs
from pretraining.errors import ConfigError
from pretraining.model.loss import HeadLoss, head_loss
from pretraining.observability import metrics as module
from pretraining.observability.metrics import Counts, Metrics, MetricsHook, Outputs, PredictedTokens

LABELS = torch.tensor([[1, 2, IGNORED_LABEL], [3, 3, 0], [IGNORED_LABEL] * 3])
ROWS = MicroBatch(torch.zeros(3, 4, dtype=torch.int32), datasets_B=torch.tensor([1, 0, 1]))
METRICS = Metrics()

pytestmark = pytest.mark.usefixtures("single_process")


class Mine:
    def sum(self, tokens: PredictedTokens) -> torch.Tensor:
        return tokens.labels_BS + tokens.losses_BS * 0

    def value(self, total: float, counts: Counts) -> float | None:
        return total / counts.tokens if counts.tokens else None


class Inherited(Mine):
    def value(self, total: float, counts: Counts) -> float:
        return -total


class Flat(Mine):
    def sum(self, tokens: PredictedTokens) -> torch.Tensor:
        return tokens.labels_BS.sum()


class Divides(Mine):
    def value(self, total: float, counts: Counts) -> float:
        return total / counts.tokens


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
    alone = METRICS.measure(loss, inputs_of(LABELS), MicroBatch(ROWS.tokens_BT), 1)  # one dataset needs no numbers
    assert alone.shape == (1, 4) and alone[0, 2:].tolist() == [5, 0]
    assert list(METRICS.values(alone[0].tolist())) == ["loss", "perplexity", "token_accuracy"]


def test_values_are_means_over_tokens_or_bytes() -> None:
    values = METRICS.values([10.0, 4, 10, 16])
    assert values == {"loss": 1.0, "perplexity": math.e, "token_accuracy": 0.4, "bits_per_byte": 10 / math.log(2) / 16}
    nothing = METRICS.values([0.0, 0, 0, 0])
    assert list(nothing) == ["loss", "perplexity", "token_accuracy"] and all(map(math.isnan, nothing.values()))
    assert METRICS.values([1e5, 0, 1, 0])["perplexity"] == math.inf


def test_a_user_defined_score_has_a_column_and_ignored_labels_do_not_count() -> None:
    scores = Metrics([f"{__name__}:Mine", f"{__name__}:Inherited"])
    assert scores.columns == ("losses", "hits", "tokens", "bytes", "custom/Mine", "custom/Inherited")
    sums = scores.measure(loss_of(LABELS), inputs_of(LABELS), ROWS, 2)
    assert sums[:, 4].tolist() == [6, 3]
    values = scores.values(sums[0].tolist())
    assert (values["custom/Mine"], values["custom/Inherited"]) == (2.0, -6.0)
    assert "custom/Mine" not in scores.values([0.0] * 6)  # None is not reported


@pytest.mark.parametrize(
    "names", [["Flat"], ["Divides"], ["Mine", "Mine"], ["Missing"]], ids=["no [B, S]", "no token", "twice", "missing"]
)
def test_what_is_no_score_is_refused_at_the_start(names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        Metrics([f"{__name__}:{name}" for name in names])
    assert refused.value.settings == ("extra_scores",)


# Three rows of four tokens: of set 1, of set 0, and of set 1 with padding; two documents in each of the first two.
MICRO_BATCH = MicroBatch(
    torch.arange(15, dtype=torch.int32).view(3, 5) % 8,
    lengths_B=torch.tensor([5, 5, 3]),
    document_starts=torch.tensor([0, 2, 5, 9, 10, 13]),
    datasets_B=torch.tensor([1, 0, 1]),
)
INPUTS = MICRO_BATCH.model_inputs()
Hook = Callable[[Outputs, ModelInputs], Any]


def loss_through(decoder: nn.Module) -> HeadLoss:
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = decoder(torch.randn(3, 4, 6, generator=generator, requires_grad=True))
    return head_loss(hidden_BSD, torch.randn(8, 6, generator=generator), INPUTS.labels_BS)


def measured_by(function: Hook, needs_hidden_states: bool = False) -> tuple[Metrics, HeadLoss]:
    decoder = nn.Identity()
    metrics = Metrics((), MetricsHook(function, needs_hidden_states), nn.ModuleDict({"model": decoder}))
    return metrics, loss_through(decoder)


def measured(metrics: Metrics, loss: HeadLoss, sets: int = 1, by_set: bool = False) -> torch.Tensor:
    return metrics.measure(loss, INPUTS, MICRO_BATCH, sets, by_set=by_set)


def pairs_of(metrics: Metrics, row: torch.Tensor) -> dict[str, list[float]]:
    """Return the sum and the count of each name of the function."""
    values = dict(zip(metrics.columns, row.tolist(), strict=True))
    return {name: [values[column] for column in pair] for name, pair in metrics.pairs.items()}


@pytest.mark.parametrize("needs_hidden_states", [True, False])
def test_outputs_are_those_of_the_micro_batch_and_know_no_gradients(needs_hidden_states: bool) -> None:
    seen: list[Outputs] = []

    def look(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        seen.append(outputs)
        assert batch is INPUTS and not torch.is_grad_enabled()
        return {}

    metrics, loss = measured_by(look, needs_hidden_states)
    measured(metrics, loss)
    (found,) = seen
    assert float(found.loss_sum) == pytest.approx(float(loss.objective_sum.detach()))
    assert int(found.valid_tokens) == int((INPUTS.labels_BS != IGNORED_LABEL).sum())
    assert torch.equal(found.losses, loss.tokens_BS2[..., 0]) and torch.equal(found.hits, loss.tokens_BS2[..., 1])
    hidden = found.hidden_states
    assert (None if hidden is None else hidden.shape) == ((3, 4, 6) if needs_hidden_states else None)
    assert not any(each.requires_grad for each in (found.losses, found.loss_sum, hidden) if each is not None)
    assert metrics._hidden is None


def test_sums_and_counts_are_added_up_by_name() -> None:
    def count(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        return {"rows": (batch.tokens_BS.size(0), 1), "loss": (outputs.loss_sum, outputs.valid_tokens)}

    metrics, loss = measured_by(count)
    table = sum((measured(metrics, loss) for _ in range(3)), torch.zeros(()))
    assert list(metrics.pairs) == ["loss", "rows"]  # the order on all ranks
    found = pairs_of(metrics, table[0])
    assert found["rows"] == [9.0, 3.0] and table.dtype == torch.float64
    assert found["loss"] == pytest.approx([3 * float(loss.objective_sum.detach()), 3 * int(loss.valid_tokens)])
    values = metrics.values(table[0].tolist())
    assert values["custom/rows"] == 3.0 and values["custom/loss"] == pytest.approx(found["loss"][0] / found["loss"][1])


def test_a_set_gets_what_a_batch_of_its_rows_alone_would_give() -> None:
    def measure(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        assert batch.positions_BS is not None and batch.document_lengths is not None
        assert sum(batch.document_lengths) == batch.tokens_BS.numel() and outputs.hidden_states is not None
        return {
            "loss": (outputs.loss_sum, outputs.valid_tokens),
            "hits": (outputs.hits.sum(), outputs.valid_tokens),
            "tokens": (batch.tokens_BS.sum(), batch.tokens_BS.numel()),
            "positions": (batch.positions_BS.sum(), 1),
            "documents": (sum(length**2 for length in batch.document_lengths), 1),
            "hidden": (outputs.hidden_states.sum(), 1),
        }

    metrics, loss = measured_by(measure, needs_hidden_states=True)
    hidden = metrics._hidden
    assert hidden is not None and INPUTS.document_lengths is not None and INPUTS.positions_BS is not None
    table = measured(metrics, loss, 3, by_set=True)
    assert not table[2].any()  # without a row
    for number, rows, documents in ((0, [1], [4]), (1, [0, 2], [2, 2, 3, 1])):
        part = loss.tokens_BS2[rows]
        valid = int((INPUTS.labels_BS[rows] != IGNORED_LABEL).sum())
        expected = {
            "loss": [float(part[..., 0].sum()), valid],
            "hits": [float(part[..., 1].sum()), valid],
            "tokens": [int(INPUTS.tokens_BS[rows].sum()), 4 * len(rows)],
            "positions": [int(INPUTS.positions_BS[rows].sum()), 1],
            "documents": [sum(length**2 for length in documents), 1],
            "hidden": [float(hidden[rows].sum()), 1],
        }
        for name, pair in expected.items():
            assert pairs_of(metrics, table[number])[name] == pytest.approx(pair), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_set_gets_the_ranks_part_of_its_shared_rows(rank: int) -> None:
    """As in ms-swift #9973, where the metrics of a channel mixed parts and whole rows under sequence parallelism."""
    group = ContextGroup(rank, 2, lambda part: part, lambda lost: lost)
    inputs = replace(MICRO_BATCH, group=group).model_inputs()
    seen: list[tuple[Outputs, ModelInputs]] = []

    def measure(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        seen.append((outputs, batch))
        return {"loss": (outputs.loss_sum, outputs.valid_tokens)}

    metrics, _ = measured_by(measure)
    loss = head_loss(torch.randn(3, 2, 6), torch.randn(8, 6), inputs.labels_BS)
    table = metrics.measure(loss, inputs, MICRO_BATCH, 2, by_set=True)
    assert table[:, metrics.columns.index("losses")].sum() == pytest.approx(float(loss.objective_sum))
    for (outputs, batch), rows, documents in zip(seen, ([1], [0, 2]), ((4,), (2, 2, 3, 1)), strict=True):
        assert batch.document_lengths is not None and batch.shared_rows is not None
        assert sum(batch.document_lengths) == batch.tokens_BS.numel() == 2 * len(rows) == outputs.losses.numel()
        assert torch.equal(batch.tokens_BS, inputs.tokens_BS[rows])
        assert batch.shared_rows.document_lengths == documents and batch.shared_rows.length == 4


@pytest.mark.parametrize(
    "returned",
    [
        None,
        {3: (1, 1)},
        {"mine": (1.0, 2, 3)},
        {"mine": ("one", 1)},
        {"mine": (torch.ones(2), 1)},
        {"mine": (torch.ones((), device="meta"), 1)},
    ],
    ids=str,
)
def test_what_is_no_metric_is_refused(returned: Any) -> None:
    metrics, loss = measured_by(lambda outputs, batch: returned)
    with pytest.raises(ConfigError) as refused:
        measured(metrics, loss)
    assert ("mine" in str(refused.value)) == (returned is not None and "mine" in returned)


@pytest.mark.parametrize(("elsewhere", "rank"), [(False, 0), (True, None)], ids=["before", "on another rank"])
def test_names_that_change_or_differ_are_refused(
    elsewhere: bool, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(function: Callable[[], tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [function(), () if elsewhere else function()]

    monkeypatch.setattr(module, "gather_from_every_rank", gather)
    names = iter(["a", "b"])
    metrics, loss = measured_by(lambda outputs, batch: {next(names): (1, 1)})
    with pytest.raises(ConfigError) as refused:
        for _ in range(2):
            measured(metrics, loss)
    assert refused.value.rank == rank
