from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import as_trained
from unit.data.token_files import random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage import index as index_module
from pretraining.data.storage import index_folder
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.dataset_files import DatasetFiles, list_datasets
from pretraining.data.storage.index import (
    BLOCK_DOCUMENTS,
    DOCUMENT,
    VIRTUAL_BOS,
    VIRTUAL_SEP,
    Index,
    settings_digest,
    split_lengths,
)
from pretraining.data.storage.index_folder import build_index, documents_as_trained, find_index
from pretraining.errors import DataError

CONFIG = DataConfig()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data_path with one small file."""
    write_documents(tmp_path / "web/x.arrow", [[1, 2]])
    return tmp_path


def files(root: Path) -> DatasetFiles:
    return list_datasets(DataConfig(data_path=str(root), datasets=("web",)))[0]


def lengths_of(index: Index, split: str = "train") -> list[int]:
    lengths: list[int] = index.split(split).lengths(0, len(index.documents)).tolist()
    return lengths


def test_it_holds_every_document_in_canonical_order(tmp_path: Path) -> None:
    write_documents(tmp_path / "web/b.arrow", [[1], [1, 2]])
    write_documents(tmp_path / "web/a/x.arrow", [[], [1, 2, 3]], batch_documents=1)
    write_documents(tmp_path / "web/empty.arrow", [])
    write_documents(tmp_path / "web/z.arrow", [[5] * 9])
    index = build_index(files(tmp_path), CONFIG)
    assert lengths_of(index) == [0, 3, 1, 2, 9]
    assert index.first_documents.tolist() == [0, 2, 4, 4, 5]
    assert [index.locate(document) for document in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]
    assert index.split("train").tokens == 15 and index.split("held_out").tokens == 0


def test_an_index_is_for_one_dataset_and_the_settings_that_decide_its_documents(root: Path) -> None:
    listed = files(root)
    changes: list[dict[str, Any]] = [{}, {"sep_token": 0}, {"bos_token": 0}, {"strip_tokens": (0,)}, {"min_length": 2}]
    changes += [{"held_out_fraction": 0.1}, {"col_name": "ids"}]
    digests = {settings_digest(listed, dataclasses.replace(CONFIG, **change)) for change in changes}
    digests.add(settings_digest(dataclasses.replace(listed, name="code"), CONFIG))
    assert len(digests) == len(changes) + 1


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_file_that_cannot_be_used_is_named(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_folder, "usable_cores", lambda: threads)
    for number in range(9):
        write_documents(tmp_path / f"web/{number}.arrow", [[1]], column="ids" if number >= 5 else "tokens")
    with pytest.raises(DataError) as raised:
        build_index(files(tmp_path), CONFIG)
    assert raised.value.path == tmp_path / "web/5.arrow"
    assert list((tmp_path / "web/.index").iterdir()) == []


def test_changed_files_are_reindexed_and_named(tmp_path: Path) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1]])
    write_documents(tmp_path / "web/y.arrow", [[1]])
    first = build_index(files(tmp_path), CONFIG)
    write_documents(tmp_path / "web/x.arrow", [[1] * 999])
    (tmp_path / "web/y.arrow").rename(tmp_path / "web/z.arrow")
    assert find_index(files(tmp_path), CONFIG) is None
    index = build_index(files(tmp_path), CONFIG)
    assert index.header["changes"] == "added: z.arrow; removed: y.arrow; changed in size: x.arrow"
    assert lengths_of(index) == [999, 1]
    assert index.path != first.path and lengths_of(Index(first.path)) == [1, 1]  # a running job may have it mapped


@pytest.mark.parametrize("documents", [30, BLOCK_DOCUMENTS + 700])
def test_an_index_damaged_anywhere_is_rebuilt(
    tmp_path: Path, documents: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "_BLOCKS_AT_ONCE", 1)
    for name, part in (("x", 20), ("y", documents - 20)):
        write_documents(tmp_path / f"web/{name}.arrow", random_documents(part, seed=part))
    path = build_index(files(tmp_path), CONFIG).path
    content = path.read_bytes()
    end_of_documents = documents * DOCUMENT.itemsize
    places = {0, 5, 321, end_of_documents - 1, *range(end_of_documents, len(content), 7 if documents == 30 else 97)}
    damaged = [content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :] for at in sorted(places)]
    for damage in (*damaged, b"", content[:5], content[:-1]):
        path.unlink()
        path.write_bytes(damage)
        assert find_index(files(tmp_path), CONFIG) is None
        caplog.clear()
        build_index(files(tmp_path), CONFIG)
        assert path.read_bytes() == content
        (said,) = caplog.messages
        assert str(path) in said


def test_indices_of_read_only_data_are_in_the_cache_folder(root: Path, cache_folder: Path) -> None:
    (root / "web/.index").write_text("a file where the folder would be: it cannot be written to")
    index = build_index(files(root), CONFIG)
    assert cache_folder in index.path.parents
    found = find_index(files(root), CONFIG)
    assert found is not None and found.path == index.path
    given = build_index(files(root), dataclasses.replace(CONFIG, index_path=str(root / "indices")))
    assert given.path.parent == root / "indices/web"
    with pytest.raises(DataError) as raised:
        build_index(files(root), dataclasses.replace(CONFIG, index_path=str(root / "web/.index")))
    assert raised.value.settings == ("index_path",)


def test_a_full_disk_leaves_nothing_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(DataError, match="No space left on device"):
        build_index(files(root), CONFIG)
    assert list((root / "web/.index").iterdir()) == []


def test_the_index_of_the_job_that_is_done_first_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may have mapped it: replacing a file on a network file system breaks its users."""
    real, places = index_folder._write_index, []

    def slow(*arguments: Any) -> Any:
        with monkeypatch.context() as other_job:
            other_job.setattr(index_folder, "_write_index", real)
            places.append(build_index(files(root), CONFIG).path.stat().st_ino)
        return real(*arguments)

    monkeypatch.setattr(index_folder, "_write_index", slow)
    index = build_index(files(root), CONFIG)
    assert [index.path.stat().st_ino] == places and lengths_of(index) == [2]
    assert sorted(each.suffix for each in (root / "web/.index").iterdir()) == [".index", ".times"]


def test_a_document_longer_than_32_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path / "web/x.arrow", [[1], [1] * 6])
    monkeypatch.setattr(index_folder, "_LARGEST_LENGTH", 5)
    with pytest.raises(DataError) as raised:
        build_index(files(tmp_path), CONFIG)
    assert (raised.value.path, raised.value.row) == (tmp_path / "web/x.arrow", 1)


def mapped_bytes(path: Path) -> int:
    """Memory of this process that belongs to a file."""
    resident = 0
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            resident += next(int(each.split()[1]) * 1024 for each in lines if each.startswith("Rss:"))
    return resident


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped memory")
def test_read_parts_of_an_index_do_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_open_indices", weakref.WeakSet())  # indices of other tests share the limit
    write_documents(tmp_path / "web/x.arrow", [[1]] * (40 * BLOCK_DOCUMENTS))
    index = build_index(files(tmp_path), CONFIG)
    monkeypatch.setattr(index_module, "_BLOCKS_MAPPED", 60)
    split, mapped = index.split("train"), []
    for look in range(80):
        block = look % 40
        split.lengths(block * BLOCK_DOCUMENTS, (block + 1) * BLOCK_DOCUMENTS)
        mapped.append(mapped_bytes(index.path))
    assert min(mapped[60:]) < max(mapped[:60]), mapped


BOS, SEP, PAD, OTHER = 1, 2, 3, 7
FEW_TOKENS = st.lists(st.sampled_from([BOS, SEP, PAD, OTHER]), max_size=12)


def trained(path: Path, ends: DataConfig) -> list[list[int]]:
    """The trained tokens of a file's documents by the index, with virtual tokens."""
    layout = ArrowFormat(DataConfig()).documents(str(path))
    documents = documents_as_trained(layout, ends)
    content = path.read_bytes()
    found = []
    for offset, tokens, flags in documents.tolist():
        kept = np.frombuffer(content, f"<u{layout.width}", tokens, offset).tolist()
        before, behind = [ends.bos_token] * bool(flags & VIRTUAL_BOS), [ends.sep_token] * bool(flags & VIRTUAL_SEP)
        found.append([*before, *kept, *behind])
    assert split_lengths(documents, 0).tolist() == [len(document) for document in found]
    return found


@settings(max_examples=100)
@given(
    st.lists(FEW_TOKENS, max_size=20),
    st.sampled_from([None, BOS, SEP, 300]),
    st.sampled_from([None, SEP, BOS, 300]),
    st.sets(st.sampled_from([BOS, SEP, PAD, 300])),
    st.integers(1, 5),
    st.sampled_from([pa.uint8(), pa.uint16(), pa.int32(), pa.int64()]),
    st.sampled_from([1, 3, 1000]),
)
@example([[PAD] * 12, [SEP], [BOS], [PAD, SEP], [OTHER], []], BOS, SEP, {PAD, SEP}, 1, pa.uint8(), 1000)
def test_documents_are_those_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    bos_token: int | None,
    sep_token: int | None,
    strip_tokens: set[int],
    min_length: int,
    kind: pa.DataType,
    batch_documents: int,
) -> None:
    root = tmp_path_factory.mktemp("ends")
    write_documents(root / "rows.arrow", documents, pa.list_(kind), batch_documents)
    write_documents(root / "batches.arrow", documents, kind)
    ends = DataConfig(sep_token=sep_token, bos_token=bos_token, strip_tokens=tuple(strip_tokens), min_length=min_length)
    expected = [as_trained(document, sep_token, bos_token, strip_tokens, min_length) for document in documents]
    assert trained(root / "rows.arrow", ends) == expected
    assert trained(root / "batches.arrow", ends) == expected
