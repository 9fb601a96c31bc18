"""The order in which a file system lists files does not matter."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.data.token_files import loader, make_root, plan, rows, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.errors import DataError


@contextmanager
def shuffled_folders(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[None]:
    """As on a file system that lists folders in an order of its own."""
    chance = random.Random(seed)
    real = os.scandir

    def scandir(path: Any) -> AbstractContextManager[list[os.DirEntry[str]]]:
        with real(path) as entries:
            found = list(entries)
        chance.shuffle(found)
        return nullcontext(found)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        yield


def test_files_are_read_in_the_same_order_however_folders_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("", "deep/", "deep/er/", "Z/", "é/"):
        for number in range(6):
            documents = [[number, len(folder), row] for row in range(5 + number)]
            write_documents(tmp_path / f"data/web/{folder}{number}.arrow", documents)
    make_root(tmp_path / "data", code=60, books=40)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data/web/deep").rename(tmp_path / "elsewhere/deep")
    (tmp_path / "data/web/deep").symlink_to(tmp_path / "elsewhere/deep")
    config = DataConfig(
        data_path=str(tmp_path / "data"), seq_length=8, logical_shards=4, num_workers=0, held_out_fraction=0.1
    )
    listing = list_datasets(config)
    first = loader(replace(config, index_path=str(tmp_path / "index")), plan(16))
    expected = [rows(next(first)) for _ in range(10)]
    for seed in range(8):
        with shuffled_folders(monkeypatch, seed):
            assert list_datasets(config) == listing
            made = loader(replace(config, index_path=str(tmp_path / f"index{seed}")), plan(16))
            assert [rows(next(made)) for _ in range(10)] == expected
            assert made.state_dict() == first.state_dict()


def test_a_link_to_a_file_that_is_gone_is_an_error_and_not_a_file_less(tmp_path: Path) -> None:
    root = make_root(tmp_path / "data", web=100)
    (root / "web/three.arrow").symlink_to(tmp_path / "elsewhere/three.arrow")
    with pytest.raises(DataError) as raised:
        list_datasets(DataConfig(data_path=str(root)))
    assert raised.value.path == root / "web/three.arrow"
