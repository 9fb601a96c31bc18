"""Changes at a resume: weights, datasets and global batch size. Each change starts a phase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, make_root, plan, rows

from pretraining.config.training import DataConfig
from pretraining.data.batch_reader import BatchReader
from pretraining.data.loader import Loader
from pretraining.data.resume import describe_order
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture, Phase, Skipped
from pretraining.data.sampling.token_stream import Spans
from pretraining.errors import DataError

CONFIG = DataConfig(use_dummy_dataset=True, seq_length=1, logical_shards=4)


def numbers_of(name: str) -> Samples:
    """A dataset whose sample k is the tokens (number of the dataset, k)."""
    count = 3

    def samples(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, shards = np.divmod(np.arange(begin, end), count)
        return shards, numbers

    def spans(shards: np.ndarray, numbers: np.ndarray) -> Spans:
        rows = len(shards)
        return Spans(numbers * count + shards, np.zeros(rows, int), np.full(rows, 2), np.arange(rows + 1))

    def read(spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        target[rows, 0], target[rows, 1] = ord(name), spans.documents

    return Samples(name, count, {"files": name}, samples, spans, read)


Range = tuple[int, int]


def numbers_loader(
    weights: Mapping[str, int], batch: int, ranks: int = 1, rank: int = 0, skip: Sequence[Range] = ()
) -> Loader:
    sources = [numbers_of(name) for name in sorted(weights)]
    phase = Phase.first(batch, weights)
    mixture = Mixture([phase], Skipped(skip))
    reader = BatchReader(sources, mixture, plan(batch, ranks), rank, CONFIG, vocab_size=1 << 20)
    fingerprints = {source.name: source.fingerprint for source in sources}
    order = describe_order(fingerprints, phase, CONFIG, seed=0, split="train")
    return Loader(reader, order | {"skipped": [list(each) for each in skip]})


def go_on(
    parts: list[Loader], state: dict[str, Any] | None, steps: int
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """The global batches of the next steps from the loaders of all ranks, and the state after them."""
    if state is not None:
        for part in parts:
            part.load_state_dict(json.loads(json.dumps(state)))
    batches = [[row for part in parts for row in rows(next(part))] for _ in range(steps)]
    states = [part.state_dict() for part in parts]
    assert all(other == states[0] for other in states)
    return batches, states[0]


ASKED = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 20), min_size=1)
SKIPPED = st.lists(st.tuples(st.integers(0, 15), st.integers(1, 12)), max_size=2)
STAGES = st.lists(
    st.tuples(ASKED, st.integers(1, 9), st.integers(0, 12), st.integers(1, 5), st.one_of(st.just([]), SKIPPED)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80)
@given(STAGES)
def test_no_change_makes_a_gap_or_a_repeat(stages: list[tuple[dict[str, int], int, int, int, list[Range]]]) -> None:
    """Steps take the samples that are not skipped, in their order."""
    state, alone = None, None
    skipped: set[int] = set()
    trained: list[int] = []
    used: dict[str, list[int]] = {name: [] for name in "abcd"}
    for weights, batch, steps, ranks, wanted in stages:
        next_sample = state["next_sample"] if state else 0
        skip = [(next_sample + first, next_sample + first + length) for first, length in wanted]
        parts = [numbers_loader(weights, batch, ranks, rank, skip) for rank in range(ranks)]
        batches, state = go_on(parts, state, steps)
        expected, alone = go_on([numbers_loader(weights, batch, skip=skip)], alone, steps)
        assert (batches, state) == (expected, alone)
        skipped |= {each for begin, end in skip for each in range(begin, end)}
        for step, rows_of_step in enumerate(batches, parts[0].next_step - steps):
            trained += sorted(parts[0].reader.slots(step).samples.tolist())
            assert len(rows_of_step) == batch
            for name, numbers in used.items():
                numbers += sorted(number for dataset, number in rows_of_step if dataset == ord(name))
        left_out = sum(each < state["next_sample"] for each in skipped)
        assert sum(state["counts"].values()) == state["next_sample"] == len(trained) + left_out
        for name, numbers in used.items():  # each counted sample is trained on once, or skipped
            assert numbers == sorted(set(numbers)) and (not numbers or numbers[-1] < state["counts"][name])
    assert trained == [each for each in range(max(trained, default=-1) + 1) if each not in skipped]


def test_each_change_is_one_line_with_the_step_at_which_it_begins() -> None:
    state = None
    lines = []
    for weights, batch in (({"a": 3, "b": 2}, 5), ({"a": 3, "b": 2}, 5), ({"a": 1, "c": 3}, 8)):
        made = numbers_loader(weights, batch)
        _, state = go_on([made], state, 10)
        lines.append(made.changes_at_resume)
    change = "weights a 0.6 -> 0.25, b 0.4 -> none, c none -> 0.75; global batch 5 -> 8 sequences"
    assert lines == [(), (), (f"phase 2 from step 20: {change}",)]
    made.rewind()
    assert made.changes_at_resume == () and len(made.state_dict()["phases"]) == 1


def test_a_phase_in_which_nothing_was_trained_leaves_no_trace() -> None:
    made = numbers_loader({"a": 1, "b": 1}, 4)
    _, state = go_on([made], None, 3)
    _, between = go_on([numbers_loader({"c": 1}, 7)], state, 0)
    assert len(between["phases"]) == 2
    _, back = go_on([numbers_loader({"a": 1, "b": 1}, 4)], between, 0)
    assert back == state
    begun = numbers_loader({"a": 1, "b": 1}, 4).state_dict()  # and where nothing was trained at all
    changed = numbers_loader({"c": 2}, 7)
    changed.load_state_dict(begun)
    assert changed.state_dict() == numbers_loader({"c": 2}, 7).state_dict() and changed.changes_at_resume == ()


def test_steps_before_a_change_are_what_they_were() -> None:
    first = numbers_loader({"a": 3, "b": 2}, 5)
    _, state = go_on([first], None, 6)
    made = numbers_loader({"a": 1, "b": 1, "c": 1}, 4)
    made.load_state_dict(state)
    for step in range(6):
        before, after = first.reader.slots(step), made.reader.slots(step)
        for field in ("samples", "datasets", "shards", "numbers"):
            assert getattr(before, field).tolist() == getattr(after, field).tolist()
    without = numbers_loader({"b": 1}, 4)
    without.load_state_dict(state)
    with pytest.raises(DataError, match=r"step 2 used datasets .* add a to"):
        without.reader.slots(2)
    assert sorted(without.reader.slots(6).samples.tolist()) == [30, 31, 32, 33]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    root = make_root(tmp_path / "data", web=100, code=60)
    return DataConfig(data_path=str(root), seq_length=16, sep_token=999, logical_shards=4, num_workers=0)


def test_a_dataset_that_comes_back_with_other_files_is_refused(config: DataConfig) -> None:
    _, state = go_on([loader(config, plan(8))], None, 3)
    only_web = replace(config, datasets=("web",))
    _, state = go_on([loader(only_web, plan(8))], state, 3)
    assert state["counts"]["code"] > 0 and state["datasets"].keys() == {"code", "web"}
    make_root(Path(config.data_path or "") / "code", more=20)
    go_on([loader(only_web, plan(8))], state, 1)  # a removed dataset may change
    with pytest.raises(DataError, match="dataset 'code'"):
        loader(config, plan(8)).load_state_dict(state)


def test_a_weight_of_zero_leaves_a_dataset_out_as_removing_it_does(config: DataConfig) -> None:
    _, state = go_on([loader(config, plan(8))], None, 3)
    removed, zero = (
        loader(replace(config, **changes), plan(8))
        for changes in ({"datasets": ("web",)}, {"datasets": ("web", "code"), "weights": (1.0, 0.0)})
    )
    assert go_on([removed], state, 2) == go_on([zero], state, 2)
    assert removed.changes_at_resume == zero.changes_at_resume != ()
