"""Changes at a resume: weights, datasets and global batch size. Each change starts a phase."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from pretraining.data.resume import describe_order, newly_skipped
from pretraining.data.samples import Samples
from pretraining.data.sampling.mixture import Mixture, Phase
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
    phase = Phase.first(batch, CONFIG.seq_length, weights)
    reader = BatchReader(sources, Mixture([phase]), plan(batch, ranks), rank, CONFIG, vocab_size=1 << 20)
    words = tuple(f"{begin}-{end - 1}" for begin, end in skip)
    order = describe_order(sources, phase, replace(CONFIG, skip_samples=words), seed=0)
    return Loader(reader, order)


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


Numbers = dict[str, list[Range]]

ASKED = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 20), min_size=1)
STAGE = st.fixed_dictionaries(
    {
        "weights": ASKED,
        "batch": st.integers(1, 9),
        "changes": st.booleans(),  # else weights and batch stay as they are
        "steps": st.integers(0, 12),
        "ranks": st.integers(1, 5),
        "skip": st.lists(st.tuples(st.integers(0, 15), st.integers(1, 12)), max_size=2),
        "repeats": st.booleans(),  # the flags of earlier starts
        "back": st.sampled_from([0, 0, 1, 2, 3]),  # saved states to go back
        "diverged": st.integers(1, 4),  # last steps, which the rollback skips
    }
)


def pairs_of(numbers: Mapping[str, Iterable[Range]]) -> set[tuple[str, int]]:
    return {(name, number) for name, ranges in numbers.items() for begin, end in ranges for number in range(begin, end)}


@dataclass
class Saved:
    """A saved state, and what had been done then: trained and skipped samples as (dataset, number), and skip flags."""

    state: dict[str, Any] | None
    trained: list[tuple[str, int]]
    skipped: set[tuple[str, int]]
    flags: list[Range]


@settings(max_examples=60)
@given(st.lists(STAGE, min_size=1, max_size=6))
def test_a_skipped_sample_is_never_used_and_every_other_one_once(stages: list[dict[str, Any]]) -> None:
    """Through any phases, skips, resumes and rollbacks, on any number of ranks.

    A sample is one of a dataset: its global number may change in a new phase that begins before it.
    """
    saved = [Saved(None, [], set(), [])]
    rolled_back: Numbers = {}
    weights, batch = {"a": 1}, 1
    for stage in stages:
        if stage["changes"] or saved[-1].state is None:
            weights, batch = stage["weights"], stage["batch"]
        if stage["back"] and saved[-1].state is not None:
            last = numbers_loader(weights, batch)  # of the run that diverges, which had these settings from its start
            last.load_state_dict(saved[-1].state)
            mixture, end = last.reader.mixture, last.next_step
            first = mixture.first_sample(max(end - stage["diverged"], 0))
            for name, ranges in mixture.numbers([(first, mixture.first_sample(end))]).items():
                rolled_back.setdefault(name, []).extend(ranges)
            sound = [place for place, each in enumerate(saved) if not each.state or each.state["next_sample"] <= first]
            del saved[sound[-min(stage["back"], len(sound))] + 1 :]
        before = saved[-1]
        next_sample = before.state["next_sample"] if before.state else 0
        new = [(next_sample + begin, next_sample + begin + length) for begin, length in stage["skip"]]
        flags = [*(before.flags if stage["repeats"] else ()), *new]
        parts = [numbers_loader(weights, batch, stage["ranks"], rank, flags) for rank in range(stage["ranks"])]
        without = numbers_loader(weights, batch)  # of the run as planned without the new flags
        for part in (*parts, without):
            if before.state is not None:
                part.load_state_dict(json.loads(json.dumps(before.state)))
            if part is not without:
                part.skip(rolled_back)
        if before.state is not None:
            assert parts[0].reader.mixture.phases == without.reader.mixture.phases
            place_of_phase(without.reader.mixture, before.state)
        asked = without.reader.mixture.numbers(newly_skipped(flags, before.state or {}))
        skipped = before.skipped | pairs_of(asked) | pairs_of(rolled_back)
        batches, state = go_on(parts, None, stage["steps"])
        assert all(len(rows_of_step) == batch for rows_of_step in batches)
        trained = before.trained + [(chr(name), number) for step in batches for name, number in step]
        saved.append(Saved(state, trained, skipped, [*before.flags, *new]))

        assert len(set(trained)) == len(trained) and not skipped & set(trained)
        behind = pairs_of({name: [(0, count)] for name, ((_, count),) in state["counts"].items()})
        assert behind == set(trained) | skipped & behind
        for name, ((_, count),) in state["counts"].items():  # a position follows a used number
            assert count == 0 or (name, count - 1) in trained
        assert len(trained) == state["next_sample"]
        again = numbers_loader(weights, batch)  # a resume knows what this run knows
        again.load_state_dict(state)
        assert again.state_dict() == state


def place_of_phase(mixture: Mixture, state: dict[str, Any]) -> None:
    """Assert that a phase that begins at a resume is where the state was saved, whatever is skipped from there on."""
    phase = mixture.phases[-1]
    if phase not in [Phase(**each) for each in state["phases"]]:
        assert phase.first_sample == state["next_sample"]
        assert {name: pairs for name, pairs in phase.base_counts.items() if pairs != [[1, 0]]} == {
            name: pairs for name, pairs in state["counts"].items() if pairs != [[1, 0]]
        }


def diverged_at_the_border() -> tuple[dict[str, Any], Loader]:
    """The state after 6 steps of 1:1 with 4 sequences, and the run of 3:1 with 8 from there, 2 steps further."""
    _, state = go_on([numbers_loader({"a": 1, "b": 1}, 4)], None, 6)
    diverged = numbers_loader({"a": 3, "b": 1}, 8)
    go_on([diverged], state, 2)
    return state, diverged


@pytest.mark.parametrize("by_flag", [False, True])
def test_a_phase_repeated_after_a_rollback_keeps_its_place_and_skips_used_samples(by_flag: bool) -> None:
    state, diverged = diverged_at_the_border()
    of_both_phases = {"a": [(10, 12), (12, 18)], "b": [(10, 12), (12, 14)]}
    assert diverged.reader.mixture.numbers([(20, 32)]) == of_both_phases
    made = numbers_loader({"a": 3, "b": 1}, 8, skip=[(24, 40)] if by_flag else [])
    made.load_state_dict(state)
    if not by_flag:
        made.skip(diverged.reader.mixture.numbers([(24, 40)]))
    (again,) = made.reader.mixture.phases[1:]
    assert (again.first_step, again.first_sample, again.base_counts) == (6, 24, {"a": [[1, 12]], "b": [[1, 12]]})
    assert made.changes_at_resume[1:] == ("skipped: samples a 12-23, b 12-15",)
    (batch,), after = go_on([made], None, 1)
    assert sorted(batch) == [[ord("a"), number] for number in range(24, 30)] + [[ord("b"), 16], [ord("b"), 17]]
    assert after["skipped"] == {"a": [[12, 24]], "b": [[12, 16]]} and after["next_sample"] == 32
    assert after["counts"] == {"a": [[1, 30]], "b": [[1, 18]]}
    # A start that comes right after the rollback's save, and one with other weights: both skip the same samples.
    made.load_state_dict(state)
    if not by_flag:
        made.skip(diverged.reader.mixture.numbers([(24, 40)]))
    at_border = made.state_dict()
    killed, other = numbers_loader({"a": 3, "b": 1}, 8), numbers_loader({"b": 1}, 8)
    killed.load_state_dict(at_border)
    other.load_state_dict(at_border)
    assert killed.state_dict() == at_border
    assert [phase.first_sample for phase in other.reader.mixture.phases] == [0, 24]
    assert sorted(go_on([other], None, 1)[0][0]) == [[ord("b"), number] for number in range(16, 24)]


def test_words_that_were_converted_do_nothing_at_a_later_start_and_others_count_from_then() -> None:
    """Numbers have moved: after 8 to 11 were skipped, sample 8 is the one that was sample 12."""
    _, state = go_on([numbers_loader({"a": 1}, 4, skip=[(8, 12)])], None, 2)
    again = numbers_loader({"a": 1}, 4, skip=[(8, 12), (8, 9), (10, 11)])
    batches, after = go_on([again], state, 1)
    assert again.changes_at_resume == ("skipped: samples a 8-12, a 14-14",)
    assert sorted(number for _, number in batches[0]) == [13, 15, 16, 17]
    assert after["skipped"] == {"a": [[8, 13], [14, 15]]} and after["skip_samples"] == [[8, 12], [8, 9], [10, 11]]
    later = numbers_loader({"a": 1}, 4, skip=[(8, 12), (8, 9), (10, 11)])
    later.load_state_dict(after)
    assert later.changes_at_resume == () and later.state_dict() == after


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


def test_a_dataset_that_comes_back_with_other_files_is_refused(small: DataConfig) -> None:
    _, state = go_on([loader(small, plan(8))], None, 3)
    only_web = replace(small, datasets=("web",))
    _, state = go_on([loader(only_web, plan(8))], state, 3)
    assert state["counts"]["code"] != [[16, 0]] and state["datasets"].keys() == {"code", "web"}
    make_root(Path(small.data_path or "") / "code", more=20)
    go_on([loader(only_web, plan(8))], state, 1)  # a removed dataset may change
    with pytest.raises(DataError, match="dataset 'code'"):
        loader(small, plan(8)).load_state_dict(state)


def test_a_weight_of_zero_equals_removing_the_dataset(small: DataConfig) -> None:
    _, state = go_on([loader(small, plan(8))], None, 3)
    removed, zero = (
        loader(replace(small, **changes), plan(8))
        for changes in ({"datasets": ("web",)}, {"datasets": ("web", "code"), "weights": (1.0, 0.0)})
    )
    assert go_on([removed], state, 2) == go_on([zero], state, 2)
    assert removed.changes_at_resume == zero.changes_at_resume != ()
