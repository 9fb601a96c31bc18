"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.data.token_files import make_root

from pretraining.config.training import DataConfig


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Three datasets with held-out documents; the smallest starts its second pass within 20 steps of 11 samples."""
    root = make_root(tmp_path_factory.mktemp("data"), web=300, code=120, books=40)
    return DataConfig(
        data_path=str(root), seq_length=24, sep_token=999, logical_shards=8, num_workers=0, held_out_fraction=0.2
    )


@pytest.fixture
def small(tmp_path: Path) -> DataConfig:
    """Two datasets whose files a test may change."""
    root = make_root(tmp_path / "data", web=100, code=60)
    return DataConfig(data_path=str(root), seq_length=16, sep_token=999, logical_shards=4, num_workers=0)
