from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from unit.data.sampling.packing_oracle import pack
from unit.data.token_files import random_documents, write_documents

from pretraining.config.training import DataConfig, Packing
from pretraining.data.dataset import build_indices, open_datasets
from pretraining.data.storage.bin_counts import BinCounts, build_bin_counts, find_bin_counts
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.data.storage.index import BLOCK_DOCUMENTS, SPLITS, Index
from pretraining.errors import DataError

DOCUMENTS = 4 * BLOCK_DOCUMENTS + 100
SEQ_LENGTH = 30


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_documents(tmp_path / "data/web/x.arrow", random_documents(DOCUMENTS))
    return index_of(config(tmp_path))


def config(root: Path, **changes: object) -> DataConfig:
    settings = DataConfig(data_path=str(root / "data"), seq_length=SEQ_LENGTH, held_out_fraction=0.1)
    return replace(settings, **changes)  # type: ignore[arg-type]


def index_of(settings: DataConfig) -> Index:
    listing = list_datasets(settings)
    build_indices(listing, settings)
    return open_datasets(listing, settings).datasets[0].index


def files_of(index: Index) -> DatasetFiles:
    return DatasetFiles("web", str(index.path.parent.parent), (), (), "0" * 32, "arrow")


def build(index: Index, packing: Packing = "best_fit") -> BinCounts:
    return build_bin_counts(files_of(index), index, DataConfig(seq_length=SEQ_LENGTH, packing=packing))


def find(index: Index, seq_length: int = SEQ_LENGTH, packing: Packing = "best_fit") -> BinCounts | None:
    return find_bin_counts(files_of(index), index, DataConfig(seq_length=seq_length, packing=packing))


def bounds_of(counts: BinCounts) -> dict[str, list[int]]:
    return {split: bounds.tolist() for split, bounds in counts.bounds.items()}


@pytest.mark.parametrize("packing", ["greedy", "first_fit", "best_fit"])
def test_the_bins_of_every_block_are_counted(index: Index, packing: Packing) -> None:
    counts = build(index, packing)
    for split in SPLITS:
        lengths = index.split(split).lengths(0, DOCUMENTS)
        blocks = np.split(lengths, range(BLOCK_DOCUMENTS, DOCUMENTS, BLOCK_DOCUMENTS))
        expected = [len(pack(block.tolist(), SEQ_LENGTH, packing)) for block in blocks]
        assert counts.bounds[split].tolist() == [0, *np.cumsum(expected).tolist()]
        assert counts.bins(split) == sum(expected)


def test_damaged_counts_and_those_of_another_index_are_rebuilt(index: Index, tmp_path: Path) -> None:
    counts = build(index)
    more = index_of(config(tmp_path, held_out_fraction=0.3))
    assert find(more) is None and find(index, seq_length=31) is None and find(index, packing="greedy") is None
    build(index, "greedy")
    (greedy,) = index.path.parent.glob("*greedy*.bins")
    (best_fit,) = index.path.parent.glob("*best_fit*.bins")
    content = best_fit.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    for damaged in (greedy.read_bytes(), flipped, content[:-16], content[content.find(b"\n") + 1 :], b""):
        best_fit.unlink()  # it may be mapped
        best_fit.write_bytes(damaged)
        assert find(index) is None
        assert bounds_of(build(index)) == bounds_of(counts) and best_fit.read_bytes() == content
    # The same documents in another order: names, sizes and tokens of every file stay the same.
    documents = random_documents(DOCUMENTS)
    write_documents(
        tmp_path / "data/web/x.arrow", [*reversed(documents[:BLOCK_DOCUMENTS]), *documents[BLOCK_DOCUMENTS:]]
    )
    index.path.unlink()
    again = index_of(config(tmp_path))
    assert again.header | {"content": index.content} == index.header and find(again) is None
    assert bounds_of(build(again)) != bounds_of(counts)


def test_missing_counts_are_an_error_that_names_index_path(index: Index, tmp_path: Path) -> None:
    settings = config(tmp_path, packing="first_fit")
    listing = list_datasets(settings)
    with pytest.raises(DataError, match="--index_path"):
        open_datasets(listing, settings)
    build_indices(listing, settings)
    assert open_datasets(listing, settings).datasets[0].counts is not None
