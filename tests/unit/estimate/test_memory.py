"""The memory estimate agrees with the model's activations, and with simulated steps of every strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import ROOT

from pretraining.config.command_line import read_words
from pretraining.config.read import read, read_recipes
from pretraining.config.training import BatchConfig, DataConfig, ParallelConfig, TrainConfig
from pretraining.config.variants import LlamaShape, resolve_shape
from pretraining.context_group import ContextGroup
from pretraining.data.batch import ModelInputs
from pretraining.estimate.costs import parameter_count
from pretraining.estimate.memory import Rank, estimate_memory, kept_bytes_per_token
from pretraining.model.llama import Llama
from pretraining.tools.command_settings import PlanConfig
from pretraining.tools.planner import cluster_of, estimate_run

SHAPE = LlamaShape(256, 704, 2, 4, 2, 64, 1000, 2048, 1e4, 1e-5, False, None)
SIMULATED = [json.loads(line) for line in (ROOT / "tests/golden/simulated_memory.jsonl").read_text().splitlines()]
"""Bytes of rank 0 in a training step of the real model, which torch's FSDPMemTracker followed on fake devices; by
tests/simulate.py of commit 3173757 with torch 2.13."""


def kept_by(model: Llama, tokens_BS: torch.Tensor, ranks: int = 1) -> int:
    """Return the bytes that forward stores for backward, without parameters; `ranks` share the rows."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    inputs = ModelInputs(tokens_BS, tokens_BS)
    if ranks > 1:
        inputs = inputs.part_of(ContextGroup(0, ranks, lambda part: torch.cat([part] * ranks, -3), lambda lost: lost))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return sum(each.untyped_storage().nbytes() for pointer, each in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_key_value_heads=4, intermediate_size=512)])
def test_a_block_stores_as_much_as_the_formula(dtype: torch.dtype, shape: LlamaShape) -> None:
    tokens_BS = torch.zeros(2, 128, dtype=torch.int64)
    shallow, deep = (Llama(replace(shape, num_hidden_layers=layers)).to(dtype) for layers in (1, 2))
    more = kept_by(deep, tokens_BS) - kept_by(shallow, tokens_BS)
    assert more == tokens_BS.numel() * kept_bytes_per_token(shape, dtype.itemsize, "cpu")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_of_shared_rows_stores_keys_and_values_of_whole_rows(ranks: int) -> None:
    tokens_BS = torch.zeros(1, 256, dtype=torch.int64)
    shallow, deep = (Llama(replace(SHAPE, num_hidden_layers=layers)) for layers in (1, 2))
    more = kept_by(deep, tokens_BS, ranks) - kept_by(shallow, tokens_BS, ranks)
    config = replace(
        TrainConfig(),
        data=DataConfig(seq_length=256),
        batch=BatchConfig(batch_size=1),
        parallel=ParallelConfig(context_parallel_size=ranks),
    )
    rank = Rank(ranks, 4, "cpu")
    estimates = [
        estimate_memory(config, replace(SHAPE, num_hidden_layers=layers), rank).activations for layers in (1, 2)
    ]
    assert more == pytest.approx(estimates[1] - estimates[0], rel=0.001)


@pytest.mark.parametrize("simulated", SIMULATED, ids=lambda simulated: simulated["flags"])
def test_the_state_is_exact_and_the_peak_close_to_a_simulated_step(simulated: dict[str, Any]) -> None:
    config = read(PlanConfig, read_recipes(read_words(PlanConfig, simulated["flags"].split()))).config
    shape = resolve_shape(config.model)
    memory = estimate_run(config, shape, cluster_of(config)).memory
    for part in ("parameters", "gradients", "optimizer_state"):
        assert getattr(memory, part) == simulated[part]
    if config.plan.gpus == 1:
        assert memory.state == 16 * parameter_count(shape)
    assert memory.activations + memory.loss == pytest.approx(simulated["activations"], rel=0.01)
    assert memory.total - memory.runtime == pytest.approx(simulated["peak"], rel=0.01)
