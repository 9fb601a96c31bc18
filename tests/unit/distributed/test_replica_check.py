from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.strategies import DimSizes
from pretraining.distributed import replica_check as replicas_module
from pretraining.distributed.replica_check import Replicas, hash_tensors


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((3, 5), (0,), (7,))]


@given(st.integers(0, 21), st.integers(0, 31), st.integers(1, 30))
def test_any_single_bit_changes_the_hash(word: int, bit: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas_module, "_CHUNK", chunk)
        values = tensors()
        before = hash_tensors(values)
        index, word = (0, word) if word < 15 else (2, word - 15)
        values[index].view(-1).view(torch.int32)[word] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert hash_tensors(values) != before
        values[index].view(-1).view(torch.int32)[word] ^= -(1 << 31) if bit == 31 else 1 << bit
        assert hash_tensors(values) == before


def test_the_places_of_values_count() -> None:
    values = torch.arange(8.0)
    assert hash_tensors([values]) != hash_tensors([values.flip(0)])
    assert hash_tensors([values[:4], values[4:]]) != hash_tensors([values[4:], values[:4]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
def test_values_of_any_size_are_hashed(dtype: torch.dtype) -> None:
    values = torch.arange(9).to(dtype)
    before = hash_tensors([values])
    values[-1] = 3
    assert hash_tensors([values]) != before


@pytest.mark.parametrize(
    ("ranks", "hashes", "odd"),
    [
        ([[0], [1], [2]], [5, 5, 5], {}),
        ([[0], [1], [2]], [5, 6, 5], {1: [0, 2]}),
        ([[0], [1], [2]], [5, 6, 7], {0: [1, 2], 1: [0, 2], 2: [0, 1]}),
        ([[0], [1]], [5, 6], {0: [1], 1: [0]}),
        ([[0, 1], [2, 3]], [5, 6, 5, 6], {}),
        ([[0, 1], [2, 3]], [5, 6, 5, 7], {1: [3], 3: [1]}),
        ([[0, 1, 2]], [5, 6, 7], {}),
        ([[0], [1], [2], [3]], [5, 5, 6, 6], {0: [1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 3], 3: [0, 1, 2]}),
    ],
)
def test_the_minority_is_returned_or_all_without_a_majority(
    ranks: list[list[int]], hashes: list[int], odd: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_gather(everyone: list[torch.Tensor], own: torch.Tensor) -> None:
        for tensor, value in zip(everyone, hashes, strict=True):
            tensor.fill_(value)

    world, shard = len(hashes), len(ranks[0])
    dims = DimSizes(world=world, node=world, replicate=len(ranks), shard=shard, context=1, data=world)
    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world)
    assert Replicas([], dims).differing_ranks() == odd
