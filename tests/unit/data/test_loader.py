from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import ROOT, run_command
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, opened, plan, rows

from pretraining.config.training import IGNORED_LABEL, DataConfig
from pretraining.data.batch import StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.dataset import build_evaluation_loader, build_loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.threads import map_in_order


def test_memory_is_pinned_in_a_process_that_uses_a_gpu(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # beside --device=cpu
    assert loader(config, plan(11)).reader._tensor_options["pin_memory"] is False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert loader(config, plan(11)).reader._tensor_options["pin_memory"] is True


def test_a_limit_ends_the_iteration_with_threads_too(config: DataConfig) -> None:
    datasets = opened(config)
    threaded = replace(config, num_workers=3)
    for limit in (1, 4):
        made, *_ = build_evaluation_loader(datasets, threaded, plan(4), 0, 7, 1000, "train", 4 * limit)
        with made:
            assert len(list(made)) == limit
            made.rewind()
            assert len(list(made)) == limit


def test_a_closed_loader_can_be_reused_and_does_not_change_torchs_threads(config: DataConfig) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = loader(replace(config, num_workers=2), plan(11))
        with made:
            next(made)
        with made:
            assert rows(next(made)) == rows(loader(config, plan(11)).reader.read(1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_at_its_step(config: DataConfig, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    class DiskOnFire(Exception):
        pass

    real = BatchReader.read

    def read(self: BatchReader, step: int) -> StepBatch:
        if step == 2:
            raise DiskOnFire(step)
        return real(self, step)

    monkeypatch.setattr(BatchReader, "read", read)
    with loader(replace(config, num_workers=workers), plan(11)) as made:
        next(made)
        next(made)
        for _ in range(2):
            with pytest.raises(DiskOnFire, match="2"):
                next(made)
            assert made.state_dict()["next_sample"] == 22
        monkeypatch.undo()
        assert next(made).step == 2


LEFT_OPEN = """
import sys, time
from pretraining.config.training import DataConfig
from unit.data.token_files import loader, plan
made = loader(DataConfig(use_dummy_dataset=True, seq_length=8, num_workers=2), plan(4))
if sys.argv[1] == "hanging":
    read = made.reader.read
    made.reader.read = lambda step: time.sleep(1000) if step else read(step)
next(made)
print("taken")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("threads_are", ["idle", "hanging"])
def test_an_open_loader_does_not_disturb_the_exit_of_the_program(threads_are: str) -> None:
    ended = run_command([sys.executable, "-c", LEFT_OPEN, threads_are], {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert (ended.stdout, ended.stderr) == ("taken\n", "")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, torch.uint16), (65_537, torch.int32)])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(config: DataConfig, vocab_size: int, dtype: torch.dtype) -> None:
    batch = next(loader(config, plan(11), vocab_size=vocab_size))
    assert batch.micro_batches[0].tokens_BT.dtype == dtype and rows(batch) == rows(next(loader(config, plan(11))))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_keep_the_order_and_never_run_far_ahead(threads: int) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for item in range(40):
            taken += 1
            yield item

    for done, result in enumerate(map_in_order(lambda item: item * item, items(), threads)):
        assert result == done**2
        assert taken <= done + 2 * threads + 1


def test_an_error_on_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 1 // item, [1, 0, 1], 2))


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
