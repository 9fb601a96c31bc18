"""Checkpointed blocks compute the same, with the same names; tests/unit/estimate measures what they store."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from emulated_varlen import emulated_varlen
from tiny_shape import TINY_SHAPE
from torch.utils.flop_counter import FlopCounterMode

from pretraining.config.training import ParallelConfig
from pretraining.distributed.activation_checkpointing import checkpoint_activations
from pretraining.estimate.costs import recomputed_flops_per_token
from pretraining.model.init import initialize_weights
from pretraining.model.llama import Llama

SHAPE = replace(TINY_SHAPE, hidden_size=32, intermediate_size=88, num_hidden_layers=6, head_dim=16)
SELECTIONS = ["1", "op", "2", "1/3"]


def checkpointing(selective: str | None) -> ParallelConfig:
    if selective is None:
        return ParallelConfig()
    return ParallelConfig(fsdp_activation_checkpointing=True, selective_checkpointing=selective)


@pytest.fixture(scope="module")
def plain() -> Llama:
    model = Llama(SHAPE)
    initialize_weights(model, SHAPE, 0, torch.device("cpu"))
    return model


def checkpointed(plain: Llama, selective: str | None) -> Llama:
    model = copy.deepcopy(plain)
    checkpoint_activations(model.model.layers, checkpointing(selective))
    return model


def batch(sequences: int = 2, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(SHAPE.vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def counted_flops(plain: Llama, selective: str | None, length: int) -> int:
    model = checkpointed(plain, selective)
    assert list(model.state_dict()) == list(plain.state_dict())  # names stay
    with FlopCounterMode(display=False) as counter:
        model(*batch(1, length))[0].backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "attention" not in str(operation))


@pytest.mark.parametrize("selective", SELECTIONS)
def test_the_recomputed_operations_agree_with_counted_ones(plain: Llama, selective: str) -> None:
    """Without attention, which the counter leaves out on a CPU before PyTorch 2.15."""
    without = counted_flops(plain, None, 64)
    more = counted_flops(plain, selective, 64) - without
    assert more == 64 * recomputed_flops_per_token(checkpointing(selective), SHAPE, 0)
    assert recomputed_flops_per_token(ParallelConfig(), SHAPE, 0) == 0


@pytest.mark.parametrize(("selective", "times"), [(None, 1), ("op", 1), ("1", 2)])
def test_varlen_attention_is_recomputed_only_with_its_block(plain: Llama, selective: str | None, times: int) -> None:
    with emulated_varlen() as calls:
        checkpointed(plain, selective)(*batch(), None, (10, 54, 64))[0].backward()
    layers = SHAPE.num_hidden_layers
    assert (calls.count("forward"), calls.count("backward")) == (times * layers, layers)
