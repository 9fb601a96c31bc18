"""Skipped samples: earlier steps stay, datasets give later samples in place of skipped ones, and `inspect` shows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.test_phases import go_on
from unit.data.token_files import loader, opened, plan

from pretraining.config.training import DataConfig
from pretraining.data.loader import Loader
from pretraining.data.sampling.mixture import SkippedNumbers, count_numbers
from pretraining.errors import DataError
from pretraining.tools.inspect import Inspector

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)).map(lambda pair: (pair[0], sum(pair))), max_size=5)


@settings(max_examples=200)
@given(RANGES, st.integers(0, 80), st.integers(0, 60))
def test_ranges_are_sets_of_numbers(ranges: list[tuple[int, int]], position: int, count: int) -> None:
    skipped = SkippedNumbers(ranges)
    left_out = {each for begin, end in ranges for each in range(begin, end)}
    used = [each for each in range(400) if each not in left_out]
    assert skipped.number(np.arange(200)).tolist() == used[:200]
    position = used[position]  # follows a used number, or is one
    rank = skipped.rank(position)
    assert rank == used.index(position)
    assert skipped.position_after(position, count) == (used[rank + count - 1] + 1 if count else position)
    parts = list(skipped.used(position, position + count))
    assert [each for first, last in parts for each in range(first, last)] == [
        each for each in used if position <= each < position + count
    ]
    assert all(first < last for first, last in parts) and count_numbers(ranges[:1]) == len(range(*[*ranges, (0, 0)][0]))


def numbers_of(made: Loader, step: int) -> list[tuple[int, int]]:
    """Return dataset and number of each sample of a step."""
    _, datasets, numbers = made.reader.mixture.assign_step(step)
    return sorted(zip(datasets.tolist(), numbers.tolist(), strict=True))


def pair_of(made: Loader, sample: int) -> tuple[int, int]:
    """Return dataset and number of a sample."""
    samples, datasets, numbers = made.reader.mixture.assign_step(made.reader.mixture.step_of_sample(sample))
    (place,) = np.flatnonzero(samples == sample)
    return int(datasets[place]), int(numbers[place])


def test_trained_samples_cannot_be_skipped(small: DataConfig) -> None:
    with loader(small, plan(8)) as begun:
        _, state = go_on([begun], None, 3)
    with loader(replace(small, skip_samples=("20-40",)), plan(8)) as made, pytest.raises(DataError, match="sample 20"):
        made.load_state_dict(state)


def test_inspect_shows_what_is_used_in_place_of_skipped_samples(small: DataConfig) -> None:
    asked = replace(small, skip_samples=("4-11",), num_workers=0)
    made, plain = loader(asked, plan(8)), loader(replace(small, num_workers=0), plan(8))
    inspector = Inspector(made.reader, opened(asked), 16)
    assert [inspector.step_of_sample(sample) for sample in (0, 7, 8, 16)] == [1, 1, 2, 3]
    assert sorted(slot.sample_id for slot in inspector.slots(1)) == [*range(8)]
    left_out = {pair_of(plain, sample) for sample in range(4, 12)}
    assert not left_out & {*numbers_of(made, 0), *numbers_of(made, 1)}
    assert numbers_of(made, 0)[0] == numbers_of(plain, 0)[0]
    summary = inspector.summary(1, 3)
    assert sum(each.samples for each in summary) == 24 and abs(sum(each.realised for each in summary) - 1) < 1e-9
