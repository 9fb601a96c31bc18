"""The cost of a batch: equal at any step, without memory that stays."""

from __future__ import annotations

import gc
import os
import resource
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from unit.data.token_files import opened, plan, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.sampling.token_stream import order_cache
from pretraining.data.storage.index import Split
from pretraining.data.storage.open_files import open_files

BATCH = 8


def resident_bytes() -> int:
    """The memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Documents of equal length, about one sample, so that all samples cost the same."""
    root = tmp_path_factory.mktemp("data")
    for name, count in (("web", 6000), ("code", 3000)):
        for half in range(2):
            documents = [[number % 100] * 61 for number in range(count // 2)]
            write_documents(root / name / f"{half}.arrow", documents, batch_documents=500)
    return DataConfig(data_path=str(root), seq_length=64, logical_shards=4, num_workers=0)


def costs_of_resumes(config: DataConfig, steps: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The cost of loading states and making the next batches, each time with empty caches."""
    costs: Counter[str] = Counter()
    peaks = []
    real_read, real_lengths = os.preadv, Split.lengths

    def read(descriptor: int, targets: Any, offset: int) -> int:
        count = real_read(descriptor, targets, offset)
        costs.update(reads=1, bytes_read=count)
        return count

    def lengths(self: Split, begin: int, end: int) -> Any:
        costs.update(lengths=end - begin)
        return real_lengths(self, begin, end)

    for step in steps:
        loader = build_loader(opened(config), config, plan(BATCH), 0, 7, 1000)
        state = loader.state_dict() | {"next_sample": step * BATCH}
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", read)
            patched.setattr(Split, "lengths", lengths)
            tracemalloc.start()
            loader.load_state_dict(state)
            for _ in range(4):
                next(loader)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert loader.state_dict()["next_sample"] == (step + 4) * BATCH
    costs["peak_bytes"] = int(median(peaks))  # other threads of the process allocate now and then
    return costs


def test_a_resume_costs_the_same_at_step_a_billion_as_ten(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume at positions all over two passes, because some samples cross blocks."""
    costs_of_resumes(config, range(5, 6), monkeypatch)  # made once per process
    near, *far = (costs_of_resumes(config, range(step, step + 2100, 200), monkeypatch) for step in (10, 10**9, 10**12))
    assert near["bytes_read"] > 11 * 4 * BATCH * 64 * 2  # everything counts
    assert all(costs[name] <= 1.1 * near[name] for costs in far for name in near)


@pytest.mark.thorough
@pytest.mark.parametrize(("workers", "batches"), [(0, 20_000), (2, 3_000)])
def test_memory_is_flat_over_any_number_of_batches(tmp_path: Path, workers: int, batches: int) -> None:
    """Hundreds of passes with full caches, which open and close files again and again."""
    for name, count in (("web", 150), ("code", 50)):
        for number in range(3):
            documents = [[number + 1] * 12 for _ in range(count)]
            write_documents(tmp_path / name / f"{number}.arrow", documents)
    config = DataConfig(data_path=str(tmp_path), seq_length=63, logical_shards=2, num_workers=workers)
    datasets = OpenedDatasets(opened(config).datasets, open_files(2), order_cache(40_000))
    with build_loader(datasets, config, plan(1), 0, 7, 1000) as loader:
        for _ in range(1000):
            next(loader)
        gc.collect()
        blocks, resident = sys.getallocatedblocks(), [resident_bytes()]
        for _ in range(5):
            for _ in range(batches // 5):
                next(loader)
            gc.collect()
            resident.append(resident_bytes())
        # One small object per batch that stayed would add as many blocks as there were batches.
        assert sys.getallocatedblocks() - blocks < batches / 10
    # A leak per batch would show in each fifth; the allocator itself grows only now and then.
    assert min(after - before for before, after in pairwise(resident)) < 100 * batches / 5
    assert datasets.orders.total_cost <= 40_000
