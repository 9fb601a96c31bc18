"""Batch sizes: a step has the same sequences on any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretraining.config.batch_sizes import BatchSizes, resolve_batch_sizes
from pretraining.config.training import BatchConfig
from pretraining.errors import ConfigError

sizes = st.integers(1, 5000)
ranks = st.integers(1, 300)


@given(sizes, st.integers(1, 64), ranks)
def test_shares_tile_the_global_batch_and_fit_the_micro_batches(size: int, batch_size: int, count: int) -> None:
    plan = resolve_batch_sizes(BatchConfig(batch_size=batch_size, global_batch_size=size), count)
    shares = [plan.share(rank) for rank in range(count)]
    assert shares[0][0] == 0 and shares[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(shares))
    lengths = [end - begin for begin, end in shares]
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= plan.micro_batch_size * plan.grad_accum_steps
    assert plan.micro_batch_size <= batch_size
    assert plan.padding_sequences == count * plan.micro_batch_size * plan.grad_accum_steps - size >= 0
    assert (plan.grad_accum_steps - 1) * batch_size < max(lengths)  # fewer micro-batches do not fit


@given(st.integers(1, 64), st.integers(1, 64), ranks)
def test_without_a_global_batch_size_it_is_the_product(batch_size: int, steps: int, count: int) -> None:
    plan = resolve_batch_sizes(BatchConfig(batch_size=batch_size, grad_accum_steps=steps), count)
    assert plan == BatchSizes(batch_size * steps * count, batch_size, steps, count)
    assert plan.padding_sequences == 0


@pytest.mark.parametrize(
    ("batch", "count", "plan"),
    [
        (BatchConfig(batch_size=2, global_batch_size=64), 8, BatchSizes(64, 2, 4, 8)),
        # Three micro-batches of 4 would compute 12 sequences for a share of 9; three of 3 need no padding.
        (BatchConfig(batch_size=4, global_batch_size=9), 1, BatchSizes(9, 3, 3, 1)),
        (BatchConfig(batch_size=4, global_batch_size=16, grad_accum_steps=4), 2, BatchSizes(16, 2, 4, 2)),
    ],
)
def test_missing_batch_sizes_are_derived(batch: BatchConfig, count: int, plan: BatchSizes) -> None:
    assert resolve_batch_sizes(batch, count) == plan


@pytest.mark.parametrize("count", [1, 2, 3, 64])
def test_a_resumed_run_keeps_its_global_batch_on_any_number_of_ranks_unless_set(count: int) -> None:
    given = BatchConfig(batch_size=2, grad_accum_steps=4)
    assert resolve_batch_sizes(given, count, restored_global_batch_size=64).global_batch_size == 64
    fixed = BatchConfig(batch_size=2, global_batch_size=64, grad_accum_steps=32)
    assert resolve_batch_sizes(fixed, count, restored_global_batch_size=64).padding_sequences < count
    told = BatchConfig(global_batch_size=8)
    assert resolve_batch_sizes(told, count, restored_global_batch_size=64).global_batch_size == 8


@pytest.mark.parametrize(
    ("batch", "count", "arithmetic"),
    [
        (BatchConfig(batch_size=2, global_batch_size=64, grad_accum_steps=4), 2, "at least 16 that divides 32"),
        (BatchConfig(batch_size=2, global_batch_size=8, grad_accum_steps=3), 4, "at least 1 that divides 2"),
        (BatchConfig(batch_size=4, global_batch_size=8, grad_accum_steps=3), 1, "at least 2 that divides 8"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: BatchConfig, count: int, arithmetic: str) -> None:
    with pytest.raises(ConfigError, match=arithmetic):
        resolve_batch_sizes(batch, count)


def test_the_description_has_the_padding() -> None:
    even = resolve_batch_sizes(BatchConfig(batch_size=2, global_batch_size=64), 8)
    assert even.describe() == "64 sequences per step: 8 data-parallel ranks x 4 micro-batches of 2"
    uneven = resolve_batch_sizes(BatchConfig(batch_size=2, global_batch_size=64), 3)
    assert uneven.describe().endswith("; 2 of 66 computed sequences are padding (3.0% wasted)")
