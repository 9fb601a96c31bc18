"""Files of equal names and sizes are told apart by content, and read again only if their time of change is new."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from unit.data.token_files import FLAT, SEP, Documents, loader, random_documents, rows, write_documents, write_flat

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_indices, open_datasets
from pretraining.data.storage import index_folder
from pretraining.data.storage.content import PART_BYTES, PARTS, _keyed_places, content_record
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.index_folder import build_index
from pretraining.errors import DataError

DOCUMENTS = [document or [7] for document in random_documents(60, vocab_size=900)]
OTHERS = [*DOCUMENTS[30:], *DOCUMENTS[:30]]
LARGE = [document or [7] for document in random_documents(40_000, vocab_size=900)]
Write = Callable[[Path, Documents], None]


def write_stream(path: Path, documents: Documents) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.uint16()))})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def flat(kind: str) -> tuple[str, Write, dict[str, object]]:
    suffix, options, changes = FLAT[kind]
    return suffix, lambda path, documents: write_flat(path, documents, **options), changes


KINDS: dict[str, tuple[str, Write, dict[str, object]]] = {
    "arrow": (".arrow", write_documents, {}),
    "arrow stream": (".arrow", write_stream, {}),
    **{name: flat(name) for name in ("npy", "llm.c", "nanoGPT", "Dolma", "Megatron")},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(root: Path, **changes: object) -> DataConfig:
    common = DataConfig(data_path=str(root), seq_length=16, sep_token=SEP, logical_shards=4, num_workers=0)
    return replace(common, **changes)  # type: ignore[arg-type]


def samples(config: DataConfig) -> list[list[list[int]]]:
    with loader(config) as made:
        return [rows(next(made)) for _ in range(20)]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> Mock:
    counted = Mock(side_effect=index_folder.read_documents)
    monkeypatch.setattr(index_folder, "read_documents", counted)
    return counted


@pytest.mark.parametrize(
    ("documents", "keeps_time"), [(DOCUMENTS, False), (DOCUMENTS, True), (LARGE, True)], ids=range(3)
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_files_of_equal_size_are_another_dataset(
    kind: str, documents: Documents, keeps_time: bool, tmp_path: Path
) -> None:
    suffix, write, changes = KINDS[kind]
    path, config = tmp_path / f"data/web/x{suffix}", config_of(tmp_path / "data", **changes)
    write(path, documents)
    half = len(documents) // 2
    write(tmp_path / f"other/web/x{suffix}", [*documents[half:], *documents[:half]])
    expected = samples(config_of(tmp_path / "other", **changes))
    with loader(config) as made:
        next(made)
        state = made.state_dict()
    for new in (tmp_path / "other/web").glob("x.*"):  # an index of Megatron is a second file
        old = path.with_name(new.name)
        status = old.stat()
        assert new.stat().st_size == status.st_size
        old.write_bytes(new.read_bytes())
        if keeps_time:
            os.utime(old, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert samples(config) == expected
    with pytest.raises(DataError, match=rf"dataset 'web' has other files \(changed in content: .*{path.name}"):
        loader(config).load_state_dict(state)


def test_a_resume_knows_its_files_also_without_the_old_index(tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "web/x.arrow"
    write_documents(path, DOCUMENTS)
    with loader(config) as made:
        next(made)
        state = made.state_dict()
    write_documents(path, OTHERS)
    shutil.rmtree(tmp_path / "web/.index")
    with pytest.raises(DataError, match="dataset 'web' has other files: content was"):
        loader(config).load_state_dict(state)
    write_documents(path, DOCUMENTS)
    loader(config).load_state_dict(state)


def test_equal_files_with_new_times_are_the_same_data_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    config = config_of(tmp_path / "data")
    for name in "abc":
        write_documents(tmp_path / f"data/web/{name}.arrow", DOCUMENTS)
    reads = count_reads(monkeypatch)
    expected = samples(config)
    before = reads.call_count
    samples(config)
    assert reads.call_count == before
    (tmp_path / "data/web/b.arrow").touch()
    assert samples(config) == expected
    assert reads.call_count == before + 1 and "looking for changes in 1 file" in caplog.text
    samples(config)
    assert reads.call_count == before + 1
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    assert samples(config_of(tmp_path / "moved")) == expected
    assert len(list((tmp_path / "moved/web/.index").glob("*.index"))) == 1
    assert reads.call_count == before + 4


def test_times_of_read_only_data_are_noted_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = tmp_path / "data/web/x.arrow", config_of(tmp_path / "data")
    write_documents(path, DOCUMENTS)
    samples(config)
    path.touch()
    writable = tempfile.mkstemp

    def refuse(*, prefix: str, suffix: str, dir: Path) -> tuple[int, str]:
        if dir.is_relative_to(tmp_path / "data"):
            raise PermissionError(13, "Permission denied")
        return writable(prefix=prefix, suffix=suffix, dir=dir)

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    reads = count_reads(monkeypatch)
    samples(config)
    assert reads.call_count == 1 and len(list(tmp_path.glob("cache/**/*.times"))) == 1
    samples(config)
    assert reads.call_count == 1


@pytest.mark.parametrize(("documents", "is_found"), [(DOCUMENTS, True), (LARGE, False)], ids=["small", "large"])
def test_one_other_token_is_found_in_small_files_only(documents: Documents, is_found: bool, tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "web/x.arrow"
    write_documents(path, documents)
    first = build_index(list_datasets(config)[0], config).content
    content = bytearray(path.read_bytes())
    parts = _keyed_places(len(content)) if not is_found else []
    pages = (page for page in range(0, len(content), PART_BYTES) if page not in parts)
    content[next(page + 100 for page in pages if is_found or page > len(content) * 3 // 4)] ^= 1
    path.write_bytes(content)
    assert (build_index(list_datasets(config)[0], config).content != first) == is_found


def test_other_borders_of_the_same_tokens_are_found_in_large_files(tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "web/x.arrow"
    write_documents(path, LARGE)
    first, size = build_index(list_datasets(config)[0], config), path.stat().st_size
    longest = max(range(1, len(LARGE)), key=lambda number: len(LARGE[number]))
    before, after = LARGE[longest - 1], LARGE[longest]
    moved = [*LARGE[: longest - 1], [*before, *after[:3]], after[3:], *LARGE[longest + 1 :]]
    write_documents(path, moved)
    assert path.stat().st_size == size
    again = build_index(list_datasets(config)[0], config)
    assert again.documents["tokens"].tolist() == list(map(len, moved)) != first.documents["tokens"].tolist()


def test_a_tenth_of_a_large_file_is_hardly_missed(tmp_path: Path) -> None:
    path, size = tmp_path / "x", 400 * PART_BYTES
    content = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    layout = Mock(lengths=np.array([size]), offsets=np.array([0]))

    def record(values: np.ndarray) -> int:
        path.write_bytes(values.tobytes())
        return content_record(path, 0, size, layout)

    expected = record(content)
    changed = 0
    for tenth in range(10):
        other = content.copy()
        other[tenth * size // 10 : (tenth + 1) * size // 10] += 1
        changed += record(other) != expected
    assert changed == 10 and size > PARTS * PART_BYTES


def test_machines_with_other_files_than_rank_0_are_refused(tmp_path: Path) -> None:
    config, path = config_of(tmp_path, index_path=str(tmp_path / "first")), tmp_path / "web/x.arrow"
    write_documents(path, DOCUMENTS)
    listing = build_indices(list_datasets(config), config)
    elsewhere = replace(config, index_path=str(tmp_path / "second"))
    assert open_datasets(build_indices(listing, elsewhere), elsewhere).datasets[0].index.content == listing[0].content
    write_documents(path, OTHERS)
    with pytest.raises(DataError, match="other files on this machine than on that of rank 0"):
        build_indices(listing, replace(config, index_path=str(tmp_path / "third")))


def test_other_borders_of_documents_are_found_where_documents_are_known(tmp_path: Path) -> None:
    """A file of up to 1 MiB is read whole, so its borders follow."""
    path = tmp_path / "x"
    records = {}
    for size in (2**20, 2**20 + 1):
        path.write_bytes(bytes(size))
        for lengths in ([5, 7], [6, 6]):
            layout = Mock(lengths=np.array(lengths), offsets=np.array([0, 5]))
            records[size, *lengths] = content_record(path, 0, size, layout)
    assert records[2**20, 5, 7] == records[2**20, 6, 6]
    assert records[2**20 + 1, 5, 7] != records[2**20 + 1, 6, 6]


def test_a_damaged_note_makes_the_files_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    write_documents(tmp_path / "web/x.arrow", DOCUMENTS)
    expected = samples(config)
    for damage in (b"", b"abc", bytes(8), bytes(80)):
        (note,) = (tmp_path / "web/.index").glob("*.times")
        note.write_bytes(damage)
        reads = count_reads(monkeypatch)
        assert samples(config) == expected and reads.call_count == 1
