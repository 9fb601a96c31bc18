"""The host never waits for the device in a step, as far as a CPU can show it; tests/gpu has the GPU's own check.

Model inputs are derived with the tokens on the meta device, which has no numbers to give, and what lies on the host by
design (lengths and places of documents) on the host. In the rest of a step nothing lies on the host: there the
operations that would ask a GPU for a number, or for a size that depends on numbers, are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from unit.train.test_step import CPU, context_for_step, micro_batches, sequences

from pretraining.data.batch import MicroBatch, ModelInputs, StepBatch
from pretraining.observability.collector import Collector
from pretraining.observability.metrics import Metrics, MetricsHook, Outputs
from pretraining.train.stability import SpikeDetector
from pretraining.train.step import StepContext, train_step

pytestmark = pytest.mark.usefixtures("single_process")

# Operations that make the host wait for a GPU: they return a number, or their output size depends on values.
WAITING = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
    *("nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "argwhere"),
    *("bincount", "repeat_interleave.Tensor"),
}


class NoWaiting(TorchDispatchMode):
    """Refuse operations that make the host wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        asks = name.split(".")[0] in WAITING or name in WAITING
        if name.startswith(("index.", "index_put", "_index_put")):  # a mask becomes indices, which are counted
            asks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if name == "repeat_interleave.Tensor" and kwargs.get("output_size") is not None:
            asks = False
        if asks:
            raise AssertionError(f"the host waits for the device: {func}")
        return func(*args, **kwargs)


def documents(batch: StepBatch) -> StepBatch:
    """Return the batch with two documents per row."""
    told_apart = []
    for micro_batch in batch.micro_batches:
        rows, length = micro_batch.tokens_BT.shape
        starts = torch.tensor([row * length + place for row in range(rows) for place in (0, 4)])
        told_apart.append(MicroBatch(micro_batch.tokens_BT, micro_batch.lengths_B, starts))
    return StepBatch(batch.step, batch.first_sample, told_apart)


def with_spikes(context: StepContext) -> StepContext:
    return replace(context, spikes=SpikeDetector(6.0, 4, CPU, {}))


def with_metrics(context: StepContext) -> StepContext:
    def measure(outputs: Outputs, batch: ModelInputs) -> dict[str, Any]:
        assert outputs.hidden_states is not None
        return {"loss": (outputs.loss_sum, outputs.valid_tokens), "norm": (outputs.hidden_states.norm(), 1)}

    hook = MetricsHook(measure, needs_hidden_states=True)
    metrics = Metrics((), hook, context.model.module)
    return replace(context, collector=Collector(metrics, ["dummy"], context.optimizer, context.shard_group))


FORMS = {"rows": lambda batch: batch, "documents": documents}
batches = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
sizes = pytest.mark.parametrize("size", [2, 4], ids=["whole", "padded"])


@pytest.mark.parametrize(
    "change", [lambda context: context, with_spikes, with_metrics], ids=["plain", "spikes", "metrics"]
)
@batches
@sizes
def test_a_step_asks_the_device_for_nothing(
    change: Callable[[StepContext], StepContext],
    form: Callable[[StepBatch], StepBatch],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    derive = MicroBatch.model_inputs

    def derive_unwatched(micro_batch: MicroBatch) -> ModelInputs:  # the test above checks it
        with _disable_current_modes():
            return derive(micro_batch)

    monkeypatch.setattr(MicroBatch, "model_inputs", derive_unwatched)
    context = change(context_for_step())
    # The first step makes the optimizer's state and the collector's sums.
    context.collector.end_step(train_step(context, form(micro_batches(sequences(6), size)), 0))
    with NoWaiting():
        for step in (1, 2, 3):
            outcome = train_step(context, form(micro_batches(sequences(6), size)), step)
            context.collector.end_step(outcome)
    assert not bool(outcome.skipped)
    assert change is not with_metrics or context.collector.metrics.pairs.keys() == {"loss", "norm"}
