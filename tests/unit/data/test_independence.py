"""Orders have nothing to do with each other: those of passes, shards, datasets, splits and seeds.

Orders are deterministic, so no test here can fail by chance. Bounds are five standard deviations of what independent
orders would show. They are thorough: the oracle and the golden batches hold the orders as they are; these tests say how
good another order would have to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from unit.data.sampling.test_token_stream import EqualLengths

from pretraining.data.sampling.keyed_hash import text_key
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import TokenStream, cut_shards, order_cache

pytestmark = pytest.mark.thorough

BLOCK = EqualLengths(1, 1).block_documents
KEY = (2023, text_key("web", "train"))


def document_orders(
    documents: int, passes: Sequence[int], shards: int = 1, key: tuple[int, int] = KEY
) -> dict[tuple[int, int], np.ndarray]:
    """By shard and pass, the place of every document in the shard's order: [documents of a shard]."""
    lengths = EqualLengths(documents, 1)
    size = documents // shards
    stream = TokenStream(lengths, cut_shards(lengths, shards), size, key, order_cache())
    orders = {}
    for shard in range(shards):
        for number in passes:
            spans = stream.spans(np.array([shard]), np.array([number]))
            orders[shard, number] = np.argsort(spans.documents[:size] - shard * size)
    return orders


def round_orders(shards: int, rounds: int, number: int = 0, key: tuple[int, int] = KEY) -> np.ndarray:
    """The place of every shard in the rounds of a pass, [rounds, shards]."""
    order = SampleOrder(np.full(shards, rounds), 1, key)
    first = order.samples_before_pass(number)
    visited, _ = order.samples(first, first + shards * rounds)
    return np.argsort(visited.reshape(rounds, shards), axis=1)


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def assert_uncorrelated(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Rank correlations are those of independent orders: each of deviation 1 / sqrt(size - 1), and their mean 0."""
    found = np.array([correlation(*pair) for pair in pairs])
    deviation = 1 / np.sqrt(len(pairs[0][0]) - 1)
    assert np.abs(found).max() < 5 * deviation
    assert abs(found.mean()) < 5 * deviation / np.sqrt(len(found))
    assert 0.7 * deviation < found.std() < 1.3 * deviation  # nor are they closer to 0 than chance is


def assert_independent(orders: Iterable[np.ndarray], others: Iterable[np.ndarray] | None = None) -> None:
    """Pairs of orders, by default of successive ones, are uncorrelated and have no common neighbours."""
    pairs = list(pairwise(orders) if others is None else zip(orders, others, strict=False))
    assert_uncorrelated(pairs)
    # What follows on an item in one order follows on it in another one as often as chance has it: once an order.
    common = 0
    for one, other in pairs:
        after = np.argsort(one)
        common += int(np.count_nonzero(other[after[1:]] - other[after[:-1]] == 1))
    assert abs(common - len(pairs)) < 5 * np.sqrt(len(pairs))


PASSES = (*range(150), *range(10**6, 10**6 + 150))


def test_orders_of_successive_passes() -> None:
    orders = list(document_orders(BLOCK // 2, PASSES).values())
    assert_independent(orders)
    assert_independent(orders, orders[2:])


def test_orders_of_blocks_in_successive_passes() -> None:
    orders = document_orders(200 * BLOCK, range(60))
    # Of each block, the place of its first document: blocks are visited whole.
    blocks = [order.reshape(200, BLOCK).min(axis=1) // BLOCK for order in orders.values()]
    assert all(sorted(order) == list(range(200)) for order in blocks)
    assert_independent(blocks)


def test_orders_of_the_blocks_of_a_pass_and_of_their_documents() -> None:
    (order,) = document_orders(100 * BLOCK, [3]).values()
    within = [np.argsort(np.argsort(places)) for places in order.reshape(100, BLOCK)]
    assert_independent(within)


def test_orders_of_neighbouring_shards() -> None:
    orders = document_orders(120 * BLOCK, [0, 1], shards=120)
    for number in (0, 1):
        assert_independent(orders[shard, number] for shard in range(120))
    assert_independent(*([orders[shard + one, one] for shard in range(119)] for one in (0, 1)))


@pytest.mark.parametrize(
    "keys",
    [
        [(2023, text_key(f"shard_{number}", "train")) for number in range(100)],
        [(seed, text_key("web", "train")) for seed in range(100)],
        [(seed // 2, text_key("web", ("train", "held_out")[seed % 2])) for seed in range(100)],
    ],
    ids=["names", "seeds", "splits"],
)
def test_orders_of_the_same_content_under_other_names_seeds_and_splits(keys: list[tuple[int, int]]) -> None:
    documents = [document_orders(BLOCK // 2, [0], key=key)[0, 0] for key in keys]
    assert_independent(documents)
    assert_independent(round_orders(300, 1, key=key)[0] for key in keys)


def test_orders_of_successive_rounds_and_of_the_same_round_of_successive_passes() -> None:
    passes = [round_orders(250, 200, number) for number in (0, 1, 10**6)]
    for rounds in passes:
        assert_independent(rounds)
    assert_independent(passes[0], passes[1])
    assert_independent(passes[0], passes[2])
