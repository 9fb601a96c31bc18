from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import Oracle

from pretraining.data.sampling import sample_order
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


@settings(max_examples=80)
@given(TOKENS, st.integers(1, 60), st.sampled_from([1, 9, 100, 4096]), st.lists(st.integers(0, 60), max_size=8))
@example([5], 5, 4096, [])
@example([3, 3, 3], 50, 9, [5])  # most passes complete no sample at all
@example([0, 1000, 0], 7, 9, [8, 9, 9, 30])  # all in one shard
def test_any_stretch_of_the_order_is_that_of_the_oracle_however_many_are_found_at_once(
    tokens: list[int], seq_length: int, at_once: int, cuts: list[int]
) -> None:
    passes = min(60, 3 * max(1, seq_length // max(tokens)) + 1)
    expected = oracle_order(tokens, seq_length, passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "_SHORTEST_STRETCH", at_once)
        order = SampleOrder(np.array(tokens), seq_length, KEY)
        borders = [0, *sorted(min(cut, len(expected)) for cut in cuts), len(expected)]
        found = [pair for begin, end in pairwise(borders) for pair in pairs(order, begin, end)]
    assert found == expected


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
