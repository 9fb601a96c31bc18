from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import in_rounds

from pretraining.data.sampling import sample_order
from pretraining.data.sampling.sample_order import SampleOrder

KEY = (3, 4)
TOKENS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(100, 400)), min_size=1, max_size=9).filter(any)


def pairs(order: SampleOrder, begin: int, end: int) -> list[tuple[int, int]]:
    shards, numbers = order.samples(begin, end)
    return list(zip(shards.tolist(), numbers.tolist(), strict=True))


@settings(max_examples=80)
@given(TOKENS, st.integers(1, 60), st.sampled_from([1, 9, 100, 4096]), st.lists(st.integers(0, 60), max_size=8))
@example([5], 5, 4096, [])
@example([3, 3, 3], 50, 9, [5])  # most passes complete no sample at all
@example([0, 1000, 0], 7, 9, [8, 9, 9, 30])  # all in one shard
def test_any_range_equals_that_of_the_oracle(tokens: list[int], seq_length: int, at_once: int, cuts: list[int]) -> None:
    passes = min(60, 3 * max(1, seq_length // max(tokens)) + 1)
    expected = in_rounds([[number * of // seq_length for of in tokens] for number in range(passes + 1)], KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_order, "_MIN_CHUNK_SAMPLES", at_once)
        order = SampleOrder(np.array(tokens), seq_length, KEY)
        borders = [0, *sorted(min(cut, len(expected)) for cut in cuts), len(expected)]
        found = [pair for begin, end in pairwise(borders) for pair in pairs(order, begin, end)]
    assert found == expected
