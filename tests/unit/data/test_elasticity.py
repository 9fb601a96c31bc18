"""The same global batches for any ranks, threads and micro-batches, and any stops."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.token_files import opened, plan, rows

from pretraining.config.training import IGNORED_LABEL, DataConfig
from pretraining.data.dataset import build_loader
from pretraining.data.samples import OpenedDatasets

STEPS, BATCH = 24, 11
RANKS, WORKERS = (1, 2, 3, 4, 6, 7, 8), (0, 1, 2, 5)
STAGES = st.lists(
    st.tuples(st.sampled_from(RANKS), st.sampled_from(WORKERS), st.integers(1, 4), st.integers(0, 4)), max_size=6
)
Batches = list[list[list[int]]]
States = list[dict[str, Any]]
Uninterrupted = tuple[Batches, States, Batches]
Stage = tuple[int, int, int, int]  # ranks, workers, accumulation, steps


@pytest.fixture(scope="module")
def datasets(config: DataConfig) -> OpenedDatasets:
    return opened(config)


@pytest.fixture(scope="module")
def uninterrupted(config: DataConfig, datasets: OpenedDatasets) -> Uninterrupted:
    """The global batches, the states before them, and the batches of made-up data."""
    alone = build_loader(datasets, config, plan(BATCH), 0, 7, 1000)
    batches, states = [], []
    for _ in range(STEPS + 1):
        states.append(alone.state_dict())
        batches.append(rows(next(alone)))
    made_up = build_loader(None, replace(config, use_dummy_dataset=True), plan(BATCH), 0, 7, 1000)
    return batches, states, [rows(next(made_up)) for _ in range(STEPS + 1)]


def go_through(datasets: OpenedDatasets | None, config: DataConfig, stages: list[Stage]) -> tuple[Batches, States]:
    """Global batches, and states at the stops, of a run that resumes with another layout in each stage."""
    batches: Batches = []
    states: States = []
    for ranks, workers, accumulation, steps in stages:
        asked = replace(config, num_workers=workers)
        batch = plan(BATCH, ranks, accumulation)
        with ExitStack() as stack:
            parts = [stack.enter_context(build_loader(datasets, asked, batch, rank, 7, 1000)) for rank in range(ranks)]
            for part in parts if states else ():
                part.load_state_dict(json.loads(json.dumps(states[-1])))
            batches += [[row for part in parts for row in rows(next(part))] for _ in range(steps)]
            after = [part.state_dict() for part in parts]
        assert all(other == after[0] for other in after)  # one state for the whole job
        states.append(after[0])
    return batches, states


@settings(max_examples=6)
@given(STAGES)
@example([(8, 2, 1, 4), (3, 5, 2, 4), (5, 1, 4, 4), (8, 0, 3, 4)])
@example([(1, workers, 1, 1) for _ in range(STEPS // 2) for workers in (0, 3)])
@example([(16, 0, 2, 3)])
def test_any_ranks_threads_micro_batches_and_stops_give_the_batches_and_states_of_a_run_without_them(
    config: DataConfig, datasets: OpenedDatasets, uninterrupted: Uninterrupted, stages: list[Stage]
) -> None:
    batches, states = go_through(datasets, config, stages)
    assert batches == uninterrupted[0][: len(batches)]
    done = 0
    for (*_, steps), state in zip(stages, states, strict=True):
        done += steps
        assert state == uninterrupted[1][done]  # it counts consumed batches, not prefetched ones


@pytest.mark.parametrize("dummy", [False, True])
def test_short_shares_are_padded_without_labels(config: DataConfig, datasets: OpenedDatasets, dummy: bool) -> None:
    asked = replace(config, use_dummy_dataset=dummy)
    padding = 0
    for rank in range(4):
        batch = plan(BATCH, 4, 2)
        with build_loader(None if dummy else datasets, asked, batch, rank, 7, 1000) as made:
            for micro_batch in [each for _ in range(3) for each in next(made).micro_batches]:
                lengths = micro_batch.lengths_B
                empty = [lengths is not None and int(lengths[row]) == 0 for row in range(batch.micro_batch_size)]
                padding += sum(empty)
                ignored = (micro_batch.model_inputs().labels_BS == IGNORED_LABEL).tolist()
                tokens = micro_batch.tokens_BT.tolist()
                assert ignored == [[is_empty] * 24 for is_empty in empty]
                assert all(row == [0] * 25 for row, is_empty in zip(tokens, empty, strict=True) if is_empty)
    assert padding == 3 * plan(BATCH, 4, 2).padding_sequences


def test_made_up_data_is_as_elastic(config: DataConfig, uninterrupted: Uninterrupted) -> None:
    dummy = replace(config, use_dummy_dataset=True)
    batches, _ = go_through(None, dummy, [(8, 2, 1, 4), (3, 0, 3, 4), (5, 5, 2, 4), (8, 1, 1, 4)])
    assert batches == uninterrupted[2][:16]
