"""Counts of parameters and operations, compared with the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pretraining.config.variants import VARIANTS, LlamaShape
from pretraining.estimate.costs import block_forward_flops, flops_per_token, parameter_count
from pretraining.model.llama import Llama

every_variant = pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS.keys())


def meta_model(shape: LlamaShape) -> Llama:
    with torch.device("meta"):
        return Llama(shape)


@every_variant
def test_parameter_count_is_that_of_the_model(shape: LlamaShape) -> None:
    assert parameter_count(shape) == sum(parameter.numel() for parameter in meta_model(shape).parameters())


def test_biases_count_as_parameters_and_not_as_operations() -> None:
    for bias in ("qkv", "true"):
        shape = replace(VARIANTS["small"], attention_bias=bias, mlp_bias=True, head_dim=32)
        assert parameter_count(shape) == sum(parameter.numel() for parameter in meta_model(shape).parameters())
        products, _ = counted(meta_model(shape), torch.zeros(1, 64, dtype=torch.int64, device="meta"))
        assert 3 * products == flops_per_token(shape, 0) * 64


@every_variant
def test_matmul_parameters_are_those_of_linear_layers(shape: LlamaShape) -> None:
    """The head counts, tied or not; the embedding look-up does not."""
    linear = [module for module in meta_model(shape).modules() if isinstance(module, nn.Linear)]
    assert flops_per_token(shape, 0) == 6 * sum(module.weight.numel() for module in linear)


def counted(model: nn.Module, *inputs: object) -> tuple[int, int]:
    """Return the FLOPs of a forward in matrix products and in attention, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    operations = counter.get_flop_counts()["Global"]
    products = sum(operations.pop(each, 0) for each in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return products, sum(operations.values())


@pytest.mark.parametrize(
    "name", ["7b", "llama2_1.4b", "llama3.2_1b", "tiny", "qwen3_0.6b", "olmo2_1b", "smollm3_3b", "granite3_2b"]
)
def test_flops_are_six_a_matmul_parameter_and_half_the_attention_matrix(name: str) -> None:
    """Backward costs twice a forward, and causality halves attention."""
    shape, length = VARIANTS[name], 256
    matrices, attention = counted(meta_model(shape), torch.zeros(1, length, dtype=torch.int64, device="meta"))
    assert 3 * matrices == flops_per_token(shape, 0) * length
    assert 3 * attention / 2 == (flops_per_token(shape, length) - flops_per_token(shape, 0)) * length


def test_documents_cost_as_much_as_a_row_of_their_mean_length_over_tokens() -> None:
    shape, lengths = VARIANTS["tiny"], (100, 28, 1, 127)
    tokens = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    _, attention = counted(meta_model(shape), tokens, None, None, lengths)
    span = sum(length**2 for length in lengths) / 256
    assert 3 * attention / 2 == (flops_per_token(shape, span) - flops_per_token(shape, 0)) * 256


@pytest.mark.parametrize("name", ["7b", "llama2_1.4b", "tiny"])
def test_blocks_cost_a_forward_without_the_head(name: str) -> None:
    shape, length = VARIANTS[name], 256
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    matrices, attention = counted(meta_model(shape).model, tokens, None, None)
    assert shape.num_hidden_layers * block_forward_flops(shape, length) * length == matrices + attention / 2
