from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import ROOT, run_command
from unit.data.token_files import loader, opened, plan, rows

from pretraining.config.training import DataConfig
from pretraining.data.batch import StepBatch
from pretraining.data.batch_reader import BatchReader
from pretraining.data.dataset import build_evaluation_loader
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
        made, *_ = build_evaluation_loader(datasets, threaded, plan(4), 0, 7, 1000, "train", 4 * limit, order_version=2)
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
