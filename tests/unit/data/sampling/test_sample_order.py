from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import Oracle

from pretraining.data.sampling import sample_order as rounds
from pretraining.data.sampling.sample_order import SampleOrder

KEY = (3, 4)
TOKENS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(100, 400)), min_size=1, max_size=9).filter(any)


def pairs(order: SampleOrder, begin: int, end: int) -> list[tuple[int, int]]:
    shards, numbers = order.samples(begin, end)
    return list(zip(shards.tolist(), numbers.tolist(), strict=True))


def oracle_order(tokens: list[int], seq_length: int, passes: int) -> list[tuple[int, int]]:
    class KnownShards(Oracle):
        def shard_documents(self) -> list[list[int]]:
            return [[document] for document in range(len(tokens))]

    return KnownShards(tokens, 1, len(tokens), seq_length, KEY).sample_order(passes)


@settings(max_examples=150)
@given(TOKENS, st.integers(1, 60))
@example([5], 5)
@example([3, 3, 3], 50)  # most passes complete no sample at all
@example([0, 1000, 0], 7)  # all in one shard
def test_the_order_is_that_of_the_oracle(tokens: list[int], seq_length: int) -> None:
    passes = min(60, 3 * max(1, seq_length // max(tokens)) + 1)
    expected = oracle_order(tokens, seq_length, passes)
    assert pairs(SampleOrder(np.array(tokens), seq_length, KEY), 0, len(expected)) == expected


@settings(max_examples=60)
@given(TOKENS, st.integers(1, 30), st.lists(st.integers(0, 60), max_size=8))
def test_any_stretch_is_a_slice_of_the_whole(tokens: list[int], seq_length: int, cuts: list[int]) -> None:
    order = SampleOrder(np.array(tokens), seq_length, KEY)
    whole = pairs(order, 0, 60)
    borders = [0, *sorted(cuts), 60]
    parts = [pairs(order, begin, end) for begin, end in pairwise(borders)]
    assert [pair for part in parts for pair in part] == whole


def test_the_order_is_the_same_however_many_samples_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([300, 500, 40, 0, 900])
    whole = pairs(SampleOrder(tokens, 7, KEY), 0, 700)
    for samples in (1, 9, 100, 1000):
        monkeypatch.setattr(rounds, "_SHORTEST_STRETCH", samples)
        assert pairs(SampleOrder(tokens, 7, KEY), 0, 700) == whole
    assert pairs(SampleOrder(tokens, 7, KEY), 350, 350) == []


@pytest.mark.parametrize("first", [0, 10**9, 10**12, 2**50 + 12345])
def test_any_place_is_found_at_once_and_exactly(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([2**33 + 17, 2**41 + 3, 5, 2**33 - 1])
    order = SampleOrder(tokens, 4096, KEY)
    evaluations = 0
    evaluate = order.samples_before_pass

    def counted(number: int) -> int:
        nonlocal evaluations
        evaluations += 1
        return evaluate(number)

    monkeypatch.setattr(order, "samples_before_pass", counted)
    shards, numbers = order.samples(first, first + 100)
    assert evaluations <= 10
    number = next(n for n in range(first * 4096 // int(tokens.sum()) + 2, -1, -1) if evaluate(n) <= first)
    for shard, sample in zip(shards.tolist(), numbers.tolist(), strict=True):
        total = int(tokens[shard])
        assert number * total // 4096 <= sample < (number + 1) * total // 4096
