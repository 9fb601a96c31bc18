"""The estimate of memory agrees with what the model keeps, and moves the right way with each lever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pretraining.config.command_line import load_train_config
from pretraining.config.training import TrainConfig
from pretraining.config.variants import LlamaShape, parameter_count, resolve_shape
from pretraining.estimate.memory import MemoryEstimate, estimate_memory, kept_bytes_per_token
from pretraining.model.llama import Llama

GIB = 2**30
SHAPE = LlamaShape(256, 704, 2, 4, 2, 64, 1000, 2048, 1e4, 1e-5, False, None)


def kept_by(model: Llama, tokens_BS: torch.Tensor) -> int:
    """Bytes that the forward pass keeps for the backward pass, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens_BS, tokens_BS)
    return sum(each.untyped_storage().nbytes() for pointer, each in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_key_value_heads=4, intermediate_size=512)])
def test_a_block_keeps_what_the_formula_says(dtype: torch.dtype, shape: LlamaShape) -> None:
    tokens_BS = torch.zeros(2, 128, dtype=torch.int64)
    shallow, deep = (Llama(replace(shape, num_hidden_layers=layers)).to(dtype) for layers in (1, 2))
    more = kept_by(deep, tokens_BS) - kept_by(shallow, tokens_BS)
    assert more == tokens_BS.numel() * kept_bytes_per_token(shape, dtype.itemsize, "cpu")


def estimate(*flags: str, ranks: int = 1, compute_bytes: int = 2, device_type: str = "cuda") -> MemoryEstimate:
    config: TrainConfig = load_train_config(["use_dummy_dataset=true", "model_variant=1b", *flags])
    shape = resolve_shape(config.model)
    return estimate_memory(config, shape, shard_size=ranks, compute_bytes=compute_bytes, device_type=device_type)


def test_the_state_is_four_float32_numbers_a_parameter_shared_by_the_ranks() -> None:
    shape = resolve_shape(load_train_config(["use_dummy_dataset=true", "model_variant=1b"]).model)
    assert estimate().state == 16 * parameter_count(shape)
    assert estimate(ranks=8).state == pytest.approx(2 * parameter_count(shape), rel=1e-6)


LESS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a smaller batch": (("batch_size=1",), {}),
    "shorter rows": (("seq_length=1024",), {}),
    "blocks computed again": (("fsdp_activation_checkpointing=true",), {}),
    "every second block computed again": (("fsdp_activation_checkpointing=true", "selective_checkpointing=2"), {}),
    "cheap operations computed again": (("fsdp_activation_checkpointing=true", "selective_checkpointing=op"), {}),
    "more ranks": ((), {"ranks": 4}),
}


@pytest.mark.parametrize("lever", LESS)
def test_what_saves_memory_lowers_the_estimate(lever: str) -> None:
    flags, place = LESS[lever]
    usual = ("batch_size=4", "seq_length=2048", "sharding_strategy=fsdp")
    assert estimate(*usual, *flags, **place).total < estimate(*usual).total
