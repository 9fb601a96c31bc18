"""Metrics of the user's own: what they are called with, what is added up, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pretraining.data.batch import IGNORED_LABEL, MicroBatch, ModelInputs
from pretraining.errors import ConfigError
from pretraining.model.loss import HeadLoss, head_loss
from pretraining.observability import custom_metrics as module
from pretraining.observability.custom_metrics import (
    NO_METRICS,
    CustomMetrics,
    MetricsHook,
    Outputs,
    Ratio,
    Sums,
    custom_metrics,
)

pytestmark = pytest.mark.usefixtures("single_process")

CPU = torch.device("cpu")
# Three rows of four tokens: of set 1, of set 0, and of set 1 with padding; two documents in each of the first two.
MICRO_BATCH = MicroBatch(
    torch.arange(15, dtype=torch.int32).view(3, 5) % 8,
    lengths_B=torch.tensor([5, 5, 3]),
    document_starts=torch.tensor([0, 2, 5, 9, 10, 13]),
    datasets_B=torch.tensor([1, 0, 1]),
)
INPUTS = MICRO_BATCH.model_inputs()
Hook = Callable[[Outputs, ModelInputs], Any]


class Identity(nn.Module):
    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return hidden_BSD


def loss_of(decoder: nn.Module) -> HeadLoss:
    generator = torch.Generator().manual_seed(0)
    hidden_BSD = decoder(torch.randn(3, 4, 6, generator=generator, requires_grad=True))
    return head_loss(hidden_BSD, torch.randn(8, 6, generator=generator), INPUTS.labels_BS)


def metrics_of(function: Hook, needs_hidden_states: bool = False) -> tuple[CustomMetrics, HeadLoss]:
    decoder = Identity()
    metrics = CustomMetrics(MetricsHook(function, needs_hidden_states), decoder, CPU)
    return metrics, loss_of(decoder)


def summed(sums: Sums) -> dict[str, list[float]]:
    return {name: pair.tolist() for name, pair in sums.items()}


def test_outputs_are_those_of_the_micro_batch_and_know_no_gradients() -> None:
    seen: list[Outputs] = []

    def look(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        seen.append(outputs)
        assert batch is INPUTS and not torch.is_grad_enabled()
        return {}

    metrics, loss = metrics_of(look, needs_hidden_states=True)
    metrics.add({}, loss, INPUTS)
    (found,) = seen
    assert float(found.loss_sum) == pytest.approx(float(loss.objective_sum.detach()))
    assert int(found.valid_tokens) == int((INPUTS.labels_BS != IGNORED_LABEL).sum())
    assert torch.equal(found.losses, loss.tokens_BS2[..., 0]) and torch.equal(found.hits, loss.tokens_BS2[..., 1])
    assert found.hidden_states is not None and found.hidden_states.shape == (3, 4, 6)
    assert not any(each.requires_grad for each in (found.hidden_states, found.losses, found.loss_sum))


def test_hidden_states_are_kept_for_one_call_and_only_where_they_are_asked_for() -> None:
    seen: list[Outputs] = []

    def look(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        seen.append(outputs)
        return {}

    for needs in (False, True):
        metrics, loss = metrics_of(look, needs)
        metrics.add({}, loss, INPUTS)
        assert metrics._hidden is None
    assert [outputs.hidden_states is None for outputs in seen] == [True, False]


def test_sums_and_counts_are_added_up_by_name() -> None:
    def count(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        return {"rows": (batch.tokens_BS.size(0), 1), "loss": (outputs.loss_sum, outputs.valid_tokens)}

    metrics, loss = metrics_of(count)
    sums: Sums = {}
    for _ in range(3):
        metrics.add(sums, loss, INPUTS)
    assert list(sums) == ["loss", "rows"] == list(metrics.names)  # in the order in which all ranks send them
    assert summed(sums)["rows"] == [9.0, 3.0] and sums["loss"].dtype == torch.float64
    assert summed(sums)["loss"] == pytest.approx([3 * float(loss.objective_sum.detach()), 3 * int(loss.valid_tokens)])


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

    metrics, loss = metrics_of(measure, needs_hidden_states=True)
    hidden = metrics._hidden
    assert hidden is not None and INPUTS.document_lengths is not None and INPUTS.positions_BS is not None
    sums: list[Sums] = [{}, {}, {}]
    metrics.add_by_set(sums, loss, INPUTS, MICRO_BATCH)
    assert sums[2] == {}  # of which there is no row
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
            assert summed(sums[number])[name] == pytest.approx(pair), name


def test_rows_of_one_set_are_looked_at_as_they_are() -> None:
    seen: list[ModelInputs] = []

    def look(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        seen.append(batch)
        return {"one": (1, 1)}

    metrics, loss = metrics_of(look)
    sums: list[Sums] = [{}]
    metrics.add_by_set(sums, loss, INPUTS, MicroBatch(MICRO_BATCH.tokens_BT))
    assert seen == [INPUTS] and summed(sums[0]) == {"one": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None: return a dict"),
        ({3: (1, 1)}, "return a dict"),
        ({"": (1, 1)}, "return a dict"),
        ({"mine": 3.0}, "mine is no pair"),
        ({"mine": (1.0, 2, 3)}, "mine is no pair"),
        ({"mine": ("one", 1)}, "mine is a pair with str in it"),
        ({"mine": (True, 1)}, "mine is a pair with bool in it"),
        ({"mine": (torch.ones(2), 1)}, r"mine is a pair with a tensor of shape \(2,\) in it"),
        ({"mine": (torch.ones((), device="meta"), 1)}, "mine is a pair with a tensor on meta in it"),
    ],
    ids=str,
)
def test_what_is_no_metric_is_refused_in_a_sentence(returned: Any, said: str) -> None:
    metrics, loss = metrics_of(lambda outputs, batch: returned)
    with pytest.raises(ConfigError, match=said):
        metrics.add({}, loss, INPUTS)


def test_other_names_than_before_are_refused_by_the_rank_that_has_them() -> None:
    names = iter(["a", "b"])
    metrics, loss = metrics_of(lambda outputs, batch: {next(names): (1, 1)})
    metrics.add({}, loss, INPUTS)
    with pytest.raises(ConfigError, match="returned b, and a before: return the same names each time") as refused:
        metrics.add({}, loss, INPUTS)
    assert refused.value.rank == 0


def test_other_names_on_another_rank_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(function: Callable[[], tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [function(), ()]

    monkeypatch.setattr(module, "gather_from_every_rank", gather)
    metrics, loss = metrics_of(lambda outputs, batch: {"a": (1, 1)})
    with pytest.raises(ConfigError, match="returned a on rank 0 and no metric on rank 1") as refused:
        metrics.add({}, loss, INPUTS)
    assert refused.value.rank is None


def test_a_run_without_a_hook_does_nothing() -> None:
    found = custom_metrics(None, nn.Module(), CPU)
    sums: Sums = {}
    found.add(sums, loss_of(Identity()), INPUTS)
    found.add_by_set([sums], loss_of(Identity()), INPUTS, MICRO_BATCH)
    assert found is NO_METRICS and sums == {} and found.names == ()


def test_a_mean_is_over_all_that_was_counted_and_of_nothing_there_is_none() -> None:
    assert Ratio.total([Ratio(2.0, 4.0), Ratio(1.0, 2.0)]).value == 0.5
    assert math.isnan(Ratio.total([]).value)


def test_a_mapping_of_any_kind_will_do() -> None:
    class Names(dict[str, Any]):
        pass

    result: Mapping[str, Any] = Names(mine=[torch.tensor(3), torch.tensor(2.0)])
    metrics, loss = metrics_of(lambda outputs, batch: result)
    sums: Sums = {}
    metrics.add(sums, loss, INPUTS)
    assert summed(sums) == {"mine": [3.0, 2.0]}
