from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretraining.data.sampling import mixture
from pretraining.data.sampling.mixture import Mixture, Phase, WeightTree, integer_weights

WEIGHTS = st.lists(st.one_of(st.just(0), st.integers(1, 10), st.integers(1, 10**9)), min_size=1, max_size=40).filter(
    any
)


ASKED_WEIGHTS = st.one_of(st.sampled_from([1e-6, 1e-3, 0.1, 1.0]), st.floats(1e-6, 1.0))


@settings(max_examples=40)
@given(st.integers(1, 1000), st.lists(ASKED_WEIGHTS, min_size=1, max_size=20), st.integers(0, 10**9))
@example(1000, [1.0, 1e-6], 10**9)
@example(1000, [0.1 * 0.618**number for number in range(24)], 10**6)
def test_each_dataset_is_within_two_samples_of_its_weight_anywhere(count: int, few: list[float], begin: int) -> None:
    asked = (few * count)[:count]
    exact = [Fraction(str(weight)) for weight in asked]
    total = sum(exact)
    shares = np.array([float(weight / total) for weight in exact])
    tree = WeightTree(list(integer_weights({str(number): weight for number, weight in enumerate(asked)}).values()))
    before = np.array(tree.counts(begin))
    assert np.abs(before - begin * shares).max() < 2
    datasets, numbers = tree.assign(begin, begin + 300)
    counts = before + np.cumsum(datasets[:, None] == np.arange(count), axis=0)
    assert np.abs(counts - np.arange(begin + 1, begin + 301)[:, None] * shares).max() < 2
    assert (numbers == counts[np.arange(300), datasets] - 1).all()


@settings(max_examples=60)
@given(WEIGHTS, st.integers(0, 2**60), st.integers(0, 200))
@example([1, 10**9 + 7, 3, 3 * 10**8], 2**60 + 12345, 200)
def test_a_datasets_samples_are_numbered_without_gaps_from_anywhere(weights: list[int], begin: int, count: int) -> None:
    tree = WeightTree(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_LARGEST_RANGE", 64)
        datasets, numbers = tree.assign(begin, begin + count)
    before, after = tree.counts(begin), tree.counts(begin + count)
    assert sum(before) == begin and sum(after) == begin + count
    for dataset in range(len(weights)):
        own = numbers[datasets == dataset].tolist()
        assert own == list(range(before[dataset], after[dataset]))


@given(st.lists(st.decimals(0, 1000, places=4), min_size=1, max_size=20).filter(any))
def test_decimal_weights_keep_their_exact_ratios(weights: list[Decimal]) -> None:
    integers = integer_weights({str(n): float(weight) for n, weight in enumerate(weights)})
    total, exact_total = sum(integers.values()), sum(Fraction(weight) for weight in weights)
    assert all(Fraction(integers[str(n)], total) == Fraction(weight) / exact_total for n, weight in enumerate(weights))


def test_weights_of_any_size_fit() -> None:
    weights = integer_weights({"a": 1e-6, "b": 1.0, "c": 3 * 10**14, "d": 0})
    assert weights["d"] == 0 and weights["a"] >= 1 and sum(weights.values()) <= 2**40 + 3
    assert weights["c"] / sum(weights.values()) == pytest.approx(1, abs=1e-9)
    assert integer_weights({"a": 10, "b": 5}) == {"a": 2, "b": 1}


NAMES = ("a", "b", "c", "d", "e")
ASKED = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), ASKED), min_size=1, max_size=6))
def test_each_dataset_keeps_order_and_weight_through_phases(wanted: list[tuple[int, int, dict[str, int]]]) -> None:
    phases: list[Phase] = []
    step = 0
    for steps, batch, weights in wanted:
        phases.append(
            Mixture(phases).phase_from(step, Phase.first(batch, 8, weights))
            if phases
            else Phase.first(batch, 8, weights)
        )
        step += steps
    mixture, ends = Mixture(phases), [*(phase.first_step for phase in phases[1:]), step]
    taken = dict.fromkeys(mixture.names, 0)
    next_sample = 0
    for phase, end in zip(phases, ends, strict=True):
        assert phase.base_counts == {name: [[8, taken[name]]] for name in phase.base_counts}
        total, given = sum(phase.weights.values()), 0
        for step in range(phase.first_step, end):
            assert mixture.first_sample(step) == next_sample
            assert mixture.positions_before_step(step) == taken
            samples, *assigned = (values.tolist() for values in mixture.assign_step(step))
            assert samples == list(range(next_sample, next_sample + phase.global_batch_size))
            next_sample += phase.global_batch_size
            for dataset, number in zip(*assigned, strict=True):
                assert number == taken[mixture.names[dataset]]  # in order, no gap, no repeat
                taken[mixture.names[dataset]] += 1
                given += 1
                for name in mixture.names:  # no burst: earlier phases leave no debt
                    share = given * phase.weights.get(name, 0) / total
                    assert abs(taken[name] - phase.base(name) - share) < 2
