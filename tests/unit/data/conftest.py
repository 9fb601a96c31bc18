"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torchdata.nodes import _apply_udf, _populate_queue, map
from unit.data.token_files import make_root

from pretraining.config.training import DataConfig


@pytest.fixture(scope="session", autouse=True)
def loaders_end_soon() -> Iterator[None]:
    """Threads that read ahead look every 0.01 s in place of 0.1 s whether they are to end: tests end hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (map, _apply_udf, _populate_queue):
            patch.setattr(module, "QUEUE_TIMEOUT", 0.01)
        yield


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three datasets, a part of each held out; the smallest begins its second pass within 20 steps of 11 samples."""
    root = make_root(tmp_path_factory.mktemp("data"), web=300, code=120, books=40)
    return DataConfig(
        data_path=str(root), seq_length=24, sep_token=999, logical_shards=8, num_workers=0, held_out_fraction=0.2
    )
