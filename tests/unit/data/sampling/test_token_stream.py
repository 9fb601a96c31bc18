from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import Oracle, Place, in_rounds

from pretraining.data.sampling import sample_order
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import Shards, Spans, TokenStream, cut_shards, order_cache, shard_count

KEY = (11, 22)


class KnownLengths:
    """Documents of given lengths."""

    def __init__(self, lengths: list[int], block_documents: int) -> None:
        self.document_count = len(lengths)
        self.block_documents = block_documents
        self._lengths = np.array(lengths, dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(self._lengths)))
        self.block_bounds = np.append(starts[:-1:block_documents], starts[-1])

    def lengths(self, begin: int, end: int) -> np.ndarray:
        return self._lengths[begin:end].copy()


def places(spans: Spans) -> list[Place]:
    return [
        (document, start + at)
        for document, start, length in zip(
            *(a.tolist() for a in (spans.documents, spans.starts, spans.lengths)), strict=True
        )
        for at in range(length)
    ]


def spans_of(made: TokenStream, shard: int, sample: int) -> Spans:
    return made.spans(np.array([shard]), np.array([sample]))


def stream(lengths: list[int], block: int, shards: int, seq_length: int) -> tuple[TokenStream, Shards, Oracle]:
    known = KnownLengths(lengths, block)
    cut = cut_shards(known, shards)
    return (
        TokenStream(known, cut, seq_length, KEY, order_cache()),
        cut,
        Oracle(lengths, block, shards, seq_length, KEY),
    )


LENGTHS = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 12), st.integers(30, 80)), min_size=1, max_size=30
).filter(any)


@settings(max_examples=150)
@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 9), st.integers(1, 20))
@example([5], 4, 7, 3)  # fewer documents than shards
@example([3, 0, 0, 2], 2, 2, 19)  # shards shorter than a sample
@example([100, 1, 1], 2, 3, 7)  # a document much longer than a sample
@example([0, 0, 1, 0], 2, 1, 1)
def test_samples_are_those_of_the_oracle(lengths: list[int], block: int, shards: int, seq_length: int) -> None:
    made, cut, oracle = stream(lengths, block, shards, seq_length)
    expected: dict[tuple[int, int], list[Place]] = {}
    for shard, tokens in enumerate(cut.tokens.tolist()):
        passes = 3 if tokens >= seq_length else -(-3 * seq_length // max(tokens, 1))
        if tokens and passes <= 30:
            expected |= {(shard, sample): row for sample, row in enumerate(oracle.shard_samples(shard, passes))}
    if not expected:
        return
    asked = sorted(expected, key=lambda pair: (pair[1], pair[0]))  # of all shards in turn
    spans = made.spans(*np.array(asked).T)
    rows = [expected[pair] for pair in asked]
    assert places(spans) == [place for row in rows for place in row] and (spans.lengths > 0).all()
    assert spans.row_tokens.tolist() == [seq_length + 1] * len(rows)
    pieces = [1 + sum(after != (document, at + 1) for (document, at), after in pairwise(row)) for row in rows]
    assert spans.rows.tolist() == [number for number, count in enumerate(pieces) for _ in range(count)]
    assert np.diff(spans.first_spans).tolist() == pieces
    begins = np.concatenate([np.cumsum([0, *part])[:-1] for part in np.split(spans.lengths, spans.first_spans[1:-1])])
    assert spans.positions(np.arange(len(rows)) * 1000).tolist() == (spans.rows * 1000 + begins).tolist()


def test_the_memory_for_orders_is_bounded_and_changes_nothing() -> None:
    lengths = np.random.default_rng(1).integers(0, 9, 600).tolist()
    small, large = order_cache(limit_bytes=2000), order_cache()
    known = KnownLengths(lengths, 16)
    cut = cut_shards(known, 5)
    forgetful = TokenStream(known, cut, 13, KEY, small)
    made = TokenStream(known, cut, 13, KEY, large)
    for sample in range(40):
        for shard in range(5):
            assert places(spans_of(forgetful, shard, sample)) == places(spans_of(made, shard, sample))
            assert small.total_cost <= 2000 or len(small) == 1
    assert len(large) > len(small)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (799, 1), (1600, 2), (10**9, 64)])
def test_small_datasets_are_cut_into_fewer_shards(tokens: int, expected: int) -> None:
    assert shard_count(tokens, seq_length=100, logical_shards=64) == expected


def test_the_samples_of_a_step_come_from_all_depths_of_their_documents() -> None:
    """42 plays with sequences of 256: a pass does not begin with a document."""
    lengths = np.random.default_rng(3).integers(6_600, 9_600, 42).tolist()
    made, cut, _ = stream(lengths, 1024, 42, 256)
    filled = np.flatnonzero(cut.tokens)
    spans = made.spans(filled, np.zeros(len(filled), dtype=np.int64))
    firsts = spans.first_spans[:-1]
    depths = np.sort(spans.starts[firsts] / np.array(lengths)[spans.documents[firsts]])
    assert len(depths) > 40 and np.abs(depths - np.linspace(0, 1, len(depths))).max() < 0.2  # Kolmogorov-Smirnov, 5%


TOKENS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(100, 400)), min_size=1, max_size=9).filter(any)


def pairs(order: SampleOrder, begin: int, end: int) -> list[tuple[int, int]]:
    shards, numbers = order.samples(begin, end)
    return list(zip(shards.tolist(), numbers.tolist(), strict=True))


@settings(max_examples=40)
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
