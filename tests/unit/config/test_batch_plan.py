"""The batch plan: the same sequences make a step on any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.batch_plan import BatchPlan, plan_batch
from pretraining.config.training import BatchConfig
from pretraining.errors import ConfigError

sizes = st.integers(1, 5000)
ranks = st.integers(1, 300)


@given(sizes, st.integers(1, 64), ranks)
def test_shares_tile_the_global_batch_and_fit_the_micro_batches(size: int, batch_size: int, count: int) -> None:
    plan = plan_batch(BatchConfig(batch_size=batch_size, global_batch_size=size), count)
    shares = [plan.share(rank) for rank in range(count)]
    assert shares[0][0] == 0 and shares[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    lengths = [end - begin for begin, end in shares]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= plan.micro_batch_size * plan.grad_accum_steps
    assert plan.micro_batch_size <= batch_size
    assert plan.padding_sequences == count * plan.micro_batch_size * plan.grad_accum_steps - size >= 0


@given(sizes, st.integers(1, 64), ranks)
def test_no_plan_takes_fewer_micro_batches(size: int, batch_size: int, count: int) -> None:
    plan = plan_batch(BatchConfig(batch_size=batch_size, global_batch_size=size), count)
    largest_share = -(-size // count)
    assert (plan.grad_accum_steps - 1) * batch_size < largest_share


@given(st.integers(1, 64), st.integers(1, 64), ranks)
def test_the_global_batch_is_the_product_where_it_is_left_open(batch_size: int, steps: int, count: int) -> None:
    plan = plan_batch(BatchConfig(batch_size=batch_size, grad_accum_steps=steps), count)
    assert plan == BatchPlan(batch_size * steps * count, batch_size, steps, count)
    assert plan.padding_sequences == 0


def test_one_micro_batch_is_the_default() -> None:
    assert plan_batch(BatchConfig(batch_size=3), 4) == BatchPlan(12, 3, 1, 4)


def test_accumulation_is_derived_from_the_global_batch() -> None:
    assert plan_batch(BatchConfig(batch_size=2, global_batch_size=64), 8) == BatchPlan(64, 2, 4, 8)


def test_micro_batches_are_evened_out() -> None:
    # Three of 4 would compute 12 sequences for a share of 9; three of 3 compute none in vain.
    assert plan_batch(BatchConfig(batch_size=4, global_batch_size=9), 1) == BatchPlan(9, 3, 3, 1)


def test_given_accumulation_shrinks_the_micro_batch() -> None:
    assert plan_batch(BatchConfig(batch_size=4, global_batch_size=16, grad_accum_steps=4), 2) == BatchPlan(16, 2, 4, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 64])
def test_a_resumed_run_keeps_its_global_batch_on_any_number_of_ranks(count: int) -> None:
    plan = plan_batch(BatchConfig(batch_size=2, grad_accum_steps=4), count, restored_global_batch_size=64)
    assert plan.global_batch_size == 64


def test_a_named_global_batch_wins_over_the_restored_one() -> None:
    assert plan_batch(BatchConfig(global_batch_size=8), 2, restored_global_batch_size=64).global_batch_size == 8


def test_accumulation_that_cannot_hold_the_share_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as error:
        plan_batch(BatchConfig(batch_size=2, global_batch_size=64, grad_accum_steps=4), 2)
    assert str(error.value) == (
        "global_batch_size=64 over 2 data-parallel ranks is at most 32 sequences a rank, but grad_accum_steps=4 x "
        "batch_size=2 takes 8: give --grad_accum_steps=16, a --batch_size of 8, or leave out --grad_accum_steps to "
        "have it derived"
    )


def test_accumulation_with_empty_micro_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 sequences a rank, too few for grad_accum_steps=3 micro-batches"):
        plan_batch(BatchConfig(batch_size=2, global_batch_size=8, grad_accum_steps=3), 4)


def test_a_plan_says_what_is_wasted() -> None:
    even = plan_batch(BatchConfig(batch_size=2, global_batch_size=64), 8)
    assert even.describe() == "64 sequences a step: 8 data-parallel ranks x 4 micro-batches of 2"
    uneven = plan_batch(BatchConfig(batch_size=2, global_batch_size=64), 3)
    assert uneven.describe().endswith("; 2 of 66 computed sequences are padding (3.0% wasted)")


@pytest.mark.parametrize(
    "settings", [{"global_batch_size": 10**18}, {"batch_size": 10**18}, {"grad_accum_steps": 10**9}]
)
def test_a_batch_that_no_memory_holds_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"sequences is more than any run has \(100,000,000 at most\)"):
        plan_batch(BatchConfig(**settings), 1)
