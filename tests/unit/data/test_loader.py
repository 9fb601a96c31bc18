from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import PATIENCE_SECONDS, ROOT, plain_environment
from unit.data.token_files import loader, make_root, opened, plan, rows

from pretraining.config.training import DataConfig
from pretraining.data.batch import StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.dataset import build_loader
from pretraining.errors import DataError


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    root = make_root(tmp_path_factory.mktemp("data"), web=300, code=120, books=40)
    return DataConfig(
        data_path=str(root), seq_length=24, sep_token=999, logical_shards=8, num_workers=0, held_out_fraction=0.2
    )


STEPS = 25  # the smallest dataset begins its second pass


@pytest.fixture(scope="module")
def batches(config: DataConfig) -> list[list[list[int]]]:
    whole = loader(config, plan(11))
    return [rows(next(whole)) for _ in range(STEPS)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 7, 8, 16])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_the_global_batch_is_the_same_on_any_number_of_ranks(
    config: DataConfig, batches: list[list[list[int]]], ranks: int, accumulation: int
) -> None:
    batch = plan(11, ranks, accumulation)
    parts = [loader(config, batch, rank) for rank in range(ranks)]
    for step in range(3):
        taken: list[StepBatch] = [next(part) for part in parts]
        assert [row for part in taken for row in rows(part)] == batches[step]
        for part in taken:
            assert (part.step, part.first_sample) == (step, 11 * step)
            assert len(part.micro_batches) == accumulation
            assert {tuple(each.tokens_BT.shape) for each in part.micro_batches} == {(batch.micro_batch_size, 25)}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_change_nothing(config: DataConfig, batches: list[list[list[int]]], workers: int) -> None:
    with loader(replace(config, num_workers=workers), plan(11)) as threaded:
        assert [rows(next(threaded)) for _ in range(STEPS)] == batches


def test_memory_is_pinned_in_a_process_that_uses_a_gpu_alone(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # beside --device=cpu
    assert loader(config, plan(11)).reader._kind["pin_memory"] is False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert loader(config, plan(11)).reader._kind["pin_memory"] is True


@pytest.mark.parametrize("workers", [0, 3])
def test_stopping_anywhere_and_going_on_equals_going_on(
    config: DataConfig, batches: list[list[list[int]]], workers: int
) -> None:
    config = replace(config, num_workers=workers)
    datasets = opened(config)
    with build_loader(datasets, config, plan(11), 0, 7, 1000) as running:
        for stop in range(STEPS - 1):
            state = json.loads(json.dumps(running.state_dict()))
            assert rows(next(running)) == batches[stop]
            with build_loader(datasets, config, plan(11), 0, 7, 1000) as resumed:
                resumed.load_state_dict(state)
                assert resumed.next_step == stop
                assert [rows(next(resumed)) for _ in range(2)] == batches[stop : stop + 2]


def test_a_run_goes_on_through_changing_numbers_of_ranks(config: DataConfig, batches: list[list[list[int]]]) -> None:
    state = loader(config, plan(11)).state_dict()
    step = 0
    for ranks in (8, 3, 5, 8):
        parts = [loader(config, plan(11, ranks), rank) for rank in range(ranks)]
        for part in parts:
            part.load_state_dict(state)
        for _ in range(3):
            assert [row for part in parts for row in rows(next(part))] == batches[step]
            step += 1
        states = [part.state_dict() for part in parts]
        assert all(other == states[0] for other in states)  # one state for the whole job
        state = states[0]


def test_the_state_counts_batches_taken_not_batches_fetched(config: DataConfig) -> None:
    with loader(replace(config, num_workers=4), plan(11)) as threaded:
        plain = loader(config, plan(11))
        for _ in range(5):
            assert threaded.state_dict() == plain.state_dict()
            next(threaded)
            next(plain)


def test_the_state_says_what_was_taken_from_each_dataset(config: DataConfig) -> None:
    running = loader(config, plan(11))
    counts = dict.fromkeys(("books", "code", "web"), 0)
    for step in range(10):
        slots = running.reader.slots(step)
        for dataset in slots.datasets.tolist():
            counts[running.reader.sources[dataset].name] += 1
        next(running)
    assert running.state_dict()["counts"] == counts and running.state_dict()["next_sample"] == 110


def test_a_resume_far_ahead_reads_what_a_resume_nearby_reads(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = BatchReader.read

    def recorded(self: BatchReader, step: int) -> StepBatch:
        read.append(step)
        return real(self, step)

    monkeypatch.setattr(BatchReader, "read", recorded)
    running = loader(config, plan(11))
    state = running.state_dict()
    for step in (10, 10**9):
        running.load_state_dict({**state, "next_sample": 11 * step})
        assert next(running).first_sample == 11 * step
    assert read == [10, 10**9]
    assert len(json.dumps(running.state_dict())) < 2000


def test_the_slots_of_a_batch_are_sorted_by_shard(config: DataConfig) -> None:
    running = loader(config, plan(64))
    slots = running.reader.slots(1)
    scaled = [
        shard * 8 // running.reader.sources[dataset].shards
        for shard, dataset in zip(slots.shards.tolist(), slots.datasets.tolist(), strict=True)
    ]
    assert scaled == sorted(scaled) and len(set(scaled)) > 3
    assert sorted(slots.samples.tolist()) == list(range(64, 128))


def test_held_out_samples_are_the_same_each_time_and_none_is_trained_on(config: DataConfig) -> None:
    datasets = opened(config)
    with build_loader(datasets, config, plan(4), 0, 7, 1000, split="held_out", limit_steps=3) as held_out:
        first = [rows(batch) for batch in held_out]
        held_out.rewind()
        assert [rows(batch) for batch in held_out] == first and len(first) == 3
    train = build_loader(datasets, config, plan(11), 0, 7, 1000)
    documents: dict[str, set[tuple[str, int]]] = {"train": set(), "held_out": set()}
    for split, made in (("train", train), ("held_out", held_out)):
        for step in range(60):
            slots = made.reader.slots(step)
            for number, source in enumerate(made.reader.sources):
                its = slots.datasets == number
                spans = source.spans(slots.shards[its], slots.numbers[its])
                documents[split].update((source.name, document) for document in spans.documents.tolist())
    assert documents["train"] and documents["held_out"] and not documents["train"] & documents["held_out"]


def test_a_limit_ends_the_iteration_with_threads_too(config: DataConfig) -> None:
    datasets = opened(config)
    threaded = replace(config, num_workers=3)
    for limit in (0, 1, 4):
        with build_loader(datasets, threaded, plan(4), 0, 7, 1000, limit_steps=limit) as made:
            assert len(list(made)) == limit
            made.rewind()
            assert len(list(made)) == limit


def test_a_closed_loader_can_be_used_again(config: DataConfig, batches: list[list[list[int]]]) -> None:
    made = loader(replace(config, num_workers=2), plan(11))
    with made:
        assert rows(next(made)) == batches[0]
    with made:
        assert rows(next(made)) == batches[1]
    made.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_with_its_own_type_at_its_step_and_again_if_asked_again(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
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


def test_a_thread_that_ends_itself_is_told_of(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchReader, "read", lambda self, step: sys.exit("by itself"))
    with loader(replace(config, num_workers=2), plan(11)) as made, pytest.raises(SystemExit, match="by itself"):
        next(made)


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
def test_a_loader_that_is_left_open_does_not_disturb_the_end_of_the_program(threads_are: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, threads_are],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment({"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "taken\n", "")


def test_threads_of_the_loader_leave_the_threads_of_torch_alone(config: DataConfig) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loader(replace(config, num_workers=2), plan(11)) as threaded:
            next(threaded)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_beyond_the_vocabulary_names_sample_and_file(config: DataConfig, workers: int) -> None:
    with loader(replace(config, num_workers=workers), plan(11), vocab_size=1000) as good:
        next(good)
    datasets = opened(replace(config, sep_token=None))
    bad = replace(config, sep_token=None, num_workers=workers)
    with (
        build_loader(datasets, bad, plan(11), 0, 7, 500) as made,
        pytest.raises(
            DataError, match=r"\.arrow, row \d+: token \d+ of the document is \d+(.|\n)*needed for sample \d+ \(step 1"
        ),
    ):
        next(made)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, torch.uint16), (65_537, torch.int32)])
def test_tokens_are_shipped_as_narrow_as_the_vocabulary_allows(
    config: DataConfig, batches: list[list[list[int]]], vocab_size: int, dtype: torch.dtype
) -> None:
    batch = next(loader(config, plan(11), vocab_size=vocab_size))
    assert batch.micro_batches[0].tokens_BT.dtype == dtype and rows(batch) == batches[0]


def test_the_order_depends_on_the_seed(config: DataConfig, batches: list[list[list[int]]]) -> None:
    other = loader(config, plan(11), seed=8)
    assert rows(next(other)) != batches[0]


def test_the_order_depends_on_neither_place_nor_time(
    config: DataConfig, batches: list[list[list[int]]], tmp_path: Path
) -> None:
    moved = replace(config, data_path=str(make_root(tmp_path / "moved", web=300, code=120, books=40)))
    assert rows(next(loader(moved, plan(11)))) == batches[0]
