"""Skipped ranges of samples: earlier steps stay, later samples move up, and `inspect` shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.test_phases import go_on
from unit.data.token_files import loader, make_root, opened, plan

from pretraining.config.training import DataConfig
from pretraining.data.sampling.mixture import Skipped
from pretraining.errors import ConfigError, DataError
from pretraining.tools.inspect import Inspector

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)).map(lambda pair: (pair[0], sum(pair))), max_size=5)


@settings(max_examples=200)
@given(RANGES, RANGES, st.integers(0, 80), st.integers(0, 60))
def test_ranges_are_sets_of_samples(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]], sample: int, count: int
) -> None:
    skipped, other = Skipped(ranges), Skipped(others)
    left_out = {each for begin, end in ranges for each in range(begin, end)}
    taken = [each for each in range(sample, 400) if each not in left_out]
    assert skipped.advance(sample, count) == taken[count]
    end = sample + count
    parts = list(skipped.taken(sample, end))
    assert [each for first, last in parts for each in range(first, last)] == [each for each in taken if each < end]
    assert all(first < last for first, last in parts)
    assert skipped.count(sample, end) == sum(each < end for each in taken)
    gone = {each for begin, end in others for each in range(begin, end)}
    assert [each for first, last in skipped.without(other) for each in range(first, last)] == sorted(left_out - gone)


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    root = make_root(tmp_path / "data", web=100, code=60)
    return DataConfig(data_path=str(root), seq_length=16, sep_token=999, logical_shards=4, num_workers=2)


def test_a_range_given_at_a_resume_is_logged_skipped_and_saved(config: DataConfig) -> None:
    with loader(config, plan(8)) as plain, loader(config, plan(8)) as begun:
        _, state = go_on([begun], None, 2)
        asked = replace(config, skip_samples=("24-31", "33"))
        with loader(asked, plan(8)) as skipping:
            assert skipping.state_dict()["skipped"] == [[24, 32], [33, 34]]
            skipping.load_state_dict(state)
            assert skipping.changes_at_resume == ("skipped: samples 24-31", "skipped: samples 33-33")
            taken, middle = go_on([skipping], None, 4)
            expected, _ = go_on([plain], None, 9)
            assert taken[0] == expected[2]
            wanted = [*range(16, 24), 32, *range(34, 57)]
            assert [s for step in range(2, 6) for s in sorted(skipping.reader.slots(step).samples.tolist())] == wanted
        with loader(config, plan(8)) as later, loader(asked, plan(8)) as again:  # with the flag or without it
            first, last = go_on([later], middle, 3)
            assert (first, last) == go_on([again], middle, 3)
            assert last["skipped"] == [[24, 32], [33, 34]] and again.changes_at_resume == ()


def test_trained_samples_cannot_be_skipped(config: DataConfig) -> None:
    with loader(config, plan(8)) as begun:
        _, state = go_on([begun], None, 3)
    with loader(replace(config, skip_samples=("20-40",)), plan(8)) as made, pytest.raises(DataError, match="sample 20"):
        made.load_state_dict(state)


def test_inspect_respects_skipped_samples(config: DataConfig) -> None:
    asked = replace(config, skip_samples=("4-11",), num_workers=0)
    inspector = Inspector(loader(asked, plan(8)).reader, opened(asked), 16)
    assert [inspector.step_of_sample(sample) for sample in (0, 3, 12, 15, 16)] == [1, 1, 1, 1, 2]
    with pytest.raises(ConfigError):
        inspector.step_of_sample(7)
    assert sorted(slot.sample_id for slot in inspector.slots(1)) == [0, 1, 2, 3, 12, 13, 14, 15]
    summary = inspector.summary(1, 3)
    assert sum(each.samples for each in summary) == 24 and abs(sum(each.realised for each in summary) - 1) < 1e-9
