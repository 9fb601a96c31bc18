"""Data in an object store: the same samples as on a disk, whatever the store, the cache and the objects suffer."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from object_store import CREDENTIALS, ObjectStore, running_store
from tiers import first_quick
from unit.data.token_files import (
    FLAT,
    SEP,
    loader,
    make_root,
    opened,
    plan,
    random_documents,
    rows,
    write_documents,
    write_flat,
)

from pretraining.config.training import DataConfig
from pretraining.data import prefetcher
from pretraining.data.dataset import build_loader, working_set_bytes
from pretraining.data.prefetcher import Prefetcher
from pretraining.data.storage import index_folder, store_files
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.document_records import record_name, write_record
from pretraining.data.storage.store_files import ChunkCache, chunk_cache
from pretraining.distributed.processes import Processes
from pretraining.errors import ConfigError, DataError
from pretraining.object_store import Store, StorePath, location
from pretraining.train.open_data import check_cache


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with running_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr("pretraining.object_store.LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("pretraining.object_store.FIRST_PAUSE_SECONDS", 0.01)
    chunk_cache.cache_clear()  # a process has one cache
    yield server
    server.heal()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "data", web=300, code=200)


def settings(path: str | Path, tmp_path: Path, **values: Any) -> DataConfig:
    """Settings with an index folder of their own, as on another machine."""
    place = "store" if "://" in str(path) else "disk"
    return DataConfig(
        data_path=str(path),
        index_path=str(tmp_path / f"index-{place}"),
        seq_length=16,
        sep_token=values.pop("sep_token", SEP),
        logical_shards=8,
        **values,
    )


def first_steps(config: DataConfig, steps: int = 24) -> list[list[list[int]]]:
    with loader(config, plan(6)) as batches:
        return [rows(batch) for batch in islice(batches, steps)]


def add_records(folder: Path) -> None:
    """Write the records that `pretrain prepare` leaves beside its files."""
    for path in folder.rglob("*.arrow"):
        write_record(path, ArrowFormat(DataConfig()).documents(str(path)), "arrow tokens")


# The same samples


@pytest.mark.parametrize("has_records", first_quick(True, False))
@pytest.mark.parametrize("in_folder", first_quick(True, False))
@pytest.mark.parametrize(
    "values", first_quick({}, {"packing": "best_fit"}, {"num_workers": 0, "bos_token": 5}, {"held_out_fraction": 0.1})
)
def test_samples_are_those_of_a_disk(
    has_records: bool, in_folder: bool, values: dict[str, Any], root: Path, tmp_path: Path, store: ObjectStore
) -> None:
    if has_records:
        add_records(root)
    address = store.upload(root, tmp_path.name)
    cache = {"data_cache_path": str(tmp_path / "cache")} if in_folder else {}
    disk, stored = settings(root, tmp_path, **values), settings(address, tmp_path, **values, **cache)
    assert first_steps(disk) == first_steps(stored)
    indices = [sorted(path.name for path in Path(each.index_path or "").rglob("*.index")) for each in (disk, stored)]
    assert indices[0] == indices[1] and len(indices[0]) == 2
    assert (tmp_path / "cache").exists() == in_folder


def test_a_run_moves_between_a_disk_and_a_store(root: Path, tmp_path: Path, store: ObjectStore) -> None:
    disk, stored = settings(root, tmp_path), settings(store.upload(root, tmp_path.name), tmp_path)
    parts, state = list[Any](), None
    for config in (disk, stored, disk, stored):
        with loader(config, plan(6)) as batches:
            if state is not None:
                batches.load_state_dict(state)
            parts += [rows(batch) for batch in islice(batches, 3)]
            state = batches.state_dict()
    assert parts == first_steps(disk, 12)


@pytest.mark.parametrize("suffix", ["npy", "bin", "idx.bin"])
def test_a_sample_may_begin_with_the_separator_behind_the_last_token_of_a_file(
    suffix: str, tmp_path: Path, store: ObjectStore
) -> None:
    folder = tmp_path / "data" / "web"
    for number in range(12):  # documents of 15 tokens and the separator: every sample ends with a separator
        write_flat(folder / f"{number:02}.{suffix}", [[number + 1] * 15] * 3, version=1 if suffix == "bin" else None)
    disk = settings(tmp_path / "data", tmp_path)
    stored = replace(disk, data_path=store.upload(tmp_path / "data", tmp_path.name), index_path=str(tmp_path / "other"))
    for length in (16, 15, 17):
        assert first_steps(replace(disk, seq_length=length), 12) == first_steps(replace(stored, seq_length=length), 12)


def test_chunks_under_other_names_and_links_in_the_cache_give_no_wrong_byte(
    root: Path, tmp_path: Path, store: ObjectStore
) -> None:
    folder = tmp_path / "cache"
    config = settings(store.upload(root, tmp_path.name), tmp_path, data_cache_path=str(folder))
    expected = first_steps(config)
    chunks = sorted((folder / "chunks").glob("??/*.chunk"))
    assert len(chunks) > 1
    contents = [chunk.read_bytes() for chunk in chunks]
    for chunk, content in zip(chunks, contents[1:] + contents[:1], strict=True):
        chunk.write_bytes(content)  # whole, and of another chunk
    chunk_cache.cache_clear()
    assert first_steps(config) == expected
    kept = tmp_path / "kept"
    kept.write_bytes(b"the user's own")
    for chunk in sorted((folder / "chunks").glob("??/*.chunk")):
        chunk.unlink()
        chunk.symlink_to(kept)
    chunk_cache.cache_clear()
    assert first_steps(config) == expected and kept.read_bytes() == b"the user's own"


def write_saved(folder: Path) -> None:
    """Write a folder of `save_to_disk` with a cache in it."""
    folder.mkdir(parents=True)
    for name in ("data-00000.arrow", "cache-1234.arrow"):
        table = pa.table({"tokens": pa.array(random_documents(90, len(name)), pa.list_(pa.int32()))})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000.arrow"}]}')


@pytest.mark.parametrize("kind", first_quick("Megatron, int32", "OLMo", "llm.c", "npy", "save_to_disk"))
def test_every_format_is_read(kind: str, tmp_path: Path, store: ObjectStore) -> None:
    folder, values = tmp_path / "data" / "web", dict[str, Any]()
    if kind == "save_to_disk":
        write_saved(folder)
    else:
        suffix, options, values = FLAT[kind]
        for number, name in enumerate(("deep/a", "b")):
            write_flat(folder / f"{name}{suffix}", random_documents(90, number), **options)
    address = store.upload(tmp_path / "data", tmp_path.name)
    disk, stored = settings(tmp_path / "data", tmp_path, **values), settings(address, tmp_path, **values)
    assert first_steps(disk) == first_steps(stored)


def test_a_dataset_is_a_folder_or_file_below_the_address_and_hidden_names_are_none(
    root: Path, tmp_path: Path, store: ObjectStore
) -> None:
    address = store.upload(root, tmp_path.name)
    store.put(f"{tmp_path.name}/.old/one.arrow", b"x")
    store.put(f"{tmp_path.name}/web/.old/one.arrow", b"x")
    config = settings(address, tmp_path)
    assert [files.name for files in list_datasets(config)] == ["code", "web"]
    (alone,) = list_datasets(replace(config, datasets=("web/one.arrow",)))
    assert (alone.is_file, alone.paths) == (True, ("one.arrow",))
    assert alone.path(0) == f"s3://bucket/{tmp_path.name}/web/one.arrow"
    with pytest.raises(DataError, match=r"--datasets names 'wob', which does not exist; s3://bucket/\S+ has code, web"):
        list_datasets(replace(config, datasets=("wob",)))
    with pytest.raises(DataError, match="--data_path is not a folder"):
        list_datasets(replace(config, data_path=store.address("nowhere")))
    with pytest.raises(DataError, match=r"copy them there \(docs/data.md\)"):
        list_datasets(replace(config, data_path=store.address(f"{tmp_path.name}/web")))


def test_names_may_hold_what_addresses_and_requests_escape(tmp_path: Path, store: ObjectStore) -> None:
    names = ["a b.arrow", "c+d=e.arrow", "f%20g.arrow", "h?i#j.arrow", "k:l&m.arrow", "ünï.arrow", "[n]{o}.arrow"]
    for number, name in enumerate(names):
        write_documents(tmp_path / "da ta+x%41" / "w e=b" / name, random_documents(60, number))
    add_records(tmp_path / "da ta+x%41")
    store.upload(tmp_path / "da ta+x%41", f"{tmp_path.name}/da ta+x%41")
    config = settings(store.address(f"{tmp_path.name}/da ta+x%41"), tmp_path, data_cache_path=str(tmp_path / "cache"))
    assert first_steps(config) == first_steps(settings(tmp_path / "da ta+x%41", tmp_path))
    assert {*names} == {*list_datasets(config)[0].paths}


def test_an_index_by_records_reads_little_and_one_without_reads_all(tmp_path: Path, store: ObjectStore) -> None:
    write_documents(tmp_path / "data" / "web" / "a.arrow", random_documents(300_000 // 20, largest=200))
    add_records(tmp_path / "data")
    size = (tmp_path / "data" / "web" / "a.arrow").stat().st_size
    address = store.upload(tmp_path / "data", tmp_path.name)
    read = _count_bytes(store, lambda: opened(settings(address, tmp_path)))
    assert read < size / 4
    store.files.delete_file(f"bucket/{tmp_path.name}/web/.a.arrow.documents")
    config = replace(settings(address, tmp_path), index_path=str(tmp_path / "other"))
    assert _count_bytes(store, lambda: opened(config)) > size


def _count_bytes(store: ObjectStore, action: Callable[[], object]) -> int:
    before = store.sent_bytes
    action()
    return store.sent_bytes - before


@pytest.mark.parametrize("strip", first_quick([3, 4], [3], []))
def test_records_give_the_index_of_the_files_also_with_stripped_ends(
    strip: list[int], tmp_path: Path, store: ObjectStore
) -> None:
    documents = random_documents(400, largest=9)
    documents[50], documents[51], documents[399] = [3, 4, 3, 8, 8, 4, 3], [3, 3, 4], [8, 3]
    documents[0], documents[200] = [], [3]
    others = [[min(token + 10, 998) for token in document] for document in documents]
    others[50:52], others[399] = documents[50:52], documents[399]
    write_documents(tmp_path / "data" / "web" / "a.arrow", others, batch_documents=30)
    add_records(tmp_path / "data")
    address = store.upload(tmp_path / "data", tmp_path.name)
    values: dict[str, Any] = {"strip_tokens": tuple(strip), "bos_token": 8, "min_length": 2}
    kinds = [settings(tmp_path / "data", tmp_path, **values), settings(address, tmp_path, **values)]
    contents = [opened(config).datasets[0].index.path.read_bytes() for config in kinds]
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    "fault", first_quick("of another file", "damaged", "of other settings", "outside the file", "too long")
)
def test_a_record_that_does_not_fit_does_not_count(fault: str, root: Path, tmp_path: Path, store: ObjectStore) -> None:
    path = root / "web" / "one.arrow"
    write_record(
        path, ArrowFormat(DataConfig()).documents(str(path)), "arrow other" if "settings" in fault else "arrow tokens"
    )
    record = path.with_name(record_name(path.name))
    if fault == "damaged":
        content = bytearray(record.read_bytes())
        content[len(content) // 2] ^= 1
        record.write_bytes(content)
    elif fault == "of another file":
        write_documents(path, random_documents(100, 77), batch_documents=7)
    elif fault == "outside the file":
        header, _, packed = record.read_bytes().partition(b"\n")
        parts = bytearray(zlib.decompress(packed))
        parts[:8] = (10**9).to_bytes(8, "little")  # before the first document
        record.write_bytes(header + b"\n" + zlib.compress(parts))
    elif fault == "too long":
        record.write_bytes(record.read_bytes().replace(b'"documents": ', b'"documents": 999999999'))
    address = store.upload(root, tmp_path.name)
    assert first_steps(settings(root, tmp_path)) == first_steps(settings(address, tmp_path))


def test_a_copy_that_cannot_be_made_is_one_error(root: Path, tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / "cache").touch()
    config = settings(store.upload(root, tmp_path.name), tmp_path, data_cache_path=str(tmp_path / "cache"))
    problem = r"s3://bucket/\S+/code/one.arrow: its copy of \S+ kB in \S+/cache cannot be written: File exists"
    with pytest.raises(DataError, match=problem):
        opened(config)


# Changed objects


def test_an_object_that_is_replaced_is_looked_at_again_and_other_content_is_another_index(
    root: Path, tmp_path: Path, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = settings(store.upload(root, tmp_path.name), tmp_path)
    before = first_steps(config)
    store.put(f"{tmp_path.name}/web/one.arrow", (root / "web" / "one.arrow").read_bytes())
    assert first_steps(config) == before and "indexing dataset 'code'" in caplog.text
    write_documents(root / "web" / "one.arrow", random_documents(100, 77), batch_documents=7)
    assert "changed in content: one.arrow" not in caplog.text
    store.put(f"{tmp_path.name}/web/one.arrow", (root / "web" / "one.arrow").read_bytes())
    assert first_steps(config) == first_steps(settings(root, tmp_path)) != before


def test_an_object_that_is_replaced_while_it_is_indexed_is_an_error(
    root: Path, tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(store.upload(root, tmp_path.name), tmp_path)
    read_local = index_folder.read_local

    def replace_meanwhile(*arguments: Any) -> Any:
        store.put(f"{tmp_path.name}/web/one.arrow", (root / "web" / "one.arrow").read_bytes()[::-1])
        return read_local(*arguments)

    monkeypatch.setattr(index_folder, "read_local", replace_meanwhile)
    with pytest.raises(DataError, match=r"s3://bucket/\S+/web/one.arrow: changed while it was read|is another version"):
        first_steps(config)


@pytest.mark.parametrize("kind", first_quick("replaced", "gone"))
def test_another_version_is_never_trained_on(kind: str, root: Path, tmp_path: Path, store: ObjectStore) -> None:
    config = replace(settings(store.upload(root, tmp_path.name), tmp_path), datasets=("web",))
    datasets = opened(config)
    content = (root / "web" / "two.arrow").read_bytes()
    if kind == "gone":
        store.files.delete_file(f"bucket/{tmp_path.name}/web/two.arrow")
    else:
        store.put(f"{tmp_path.name}/web/two.arrow", content[:-400] + bytes(390) + content[-10:])  # of the same size
    expected = (
        r"two.arrow: is gone since" if kind == "gone" else r"two.arrow: is another version since the job listed it"
    )
    with pytest.raises(DataError, match=expected), build_loader(datasets, config, plan(6), 0, 7, 1000) as batches:
        list(islice(batches, 24))
    if kind == "replaced":  # it counts again once it is back
        store.put(f"{tmp_path.name}/web/two.arrow", content)
        assert first_steps(config) == first_steps(replace(settings(root, tmp_path), datasets=("web",)))
        return
    quarantined = replace(config, bad_documents="quarantine")
    with build_loader(datasets, quarantined, plan(6), 0, 7, 1000) as batches:
        masks = [each.unreadable_B for batch in islice(batches, 12) for each in batch.micro_batches]
    assert any(mask is not None and mask.any() for mask in masks)


# Faults of the store


@pytest.mark.parametrize("fault", first_quick("cut", "503", "away", "slow"))
def test_failing_answers_are_asked_for_again(fault: str, root: Path, tmp_path: Path, store: ObjectStore) -> None:
    config = settings(store.upload(root, tmp_path.name), tmp_path)
    expected = first_steps(settings(root, tmp_path))
    store.fault(b".arrow", fault, times=4)
    assert first_steps(config) == expected
    chunk_cache.cache_clear()
    datasets = opened(config)
    store.heal()
    store.fault(b"GET /", fault, times=4)
    met = store.met
    with build_loader(datasets, config, plan(6), 0, 7, 1000) as batches:
        assert [rows(batch) for batch in islice(batches, 24)] == expected
    assert store.met > met


def test_a_store_that_stays_away_is_one_error_and_no_secret_is_shown(
    root: Path, tmp_path: Path, store: ObjectStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "TRIES", 2)
    config = replace(settings(store.upload(root, tmp_path.name), tmp_path), datasets=("web",))
    datasets = opened(config)
    store.fault(b"one.arrow", "403", times=10**9)
    for bad_documents in ("stop", "quarantine"):
        asked = replace(config, bad_documents=bad_documents)
        with build_loader(datasets, asked, plan(6), 0, 7, 1000) as batches:
            if bad_documents == "stop":
                with pytest.raises(DataError, match=r"s3://bucket/\S+/web/one.arrow: cannot be used: .*ACCESS_DENIED"):
                    list(islice(batches, 24))
            else:
                assert len(list(islice(batches, 24))) == 24
    text = caplog.text + "".join(path.read_text("latin-1") for path in tmp_path.rglob("*.index"))
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in text


@pytest.mark.parametrize("threads", [0, 2])
def test_fetches_that_hang_do_not_keep_a_loader_open(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "CLOSING_SECONDS", 0.1)
    exits = list[str]()
    monkeypatch.setattr(prefetcher, "exit_without_waiting", lambda: exits.append("at once"))
    answer, begun = threading.Event(), threading.Semaphore(0)

    def fetch() -> None:
        begun.release()
        answer.wait()

    same = lambda step: step  # noqa: E731
    reader: Any = SimpleNamespace(locate=same, fetches=lambda step: [fetch], read=same, is_remote=True)
    ahead: Any = Prefetcher(reader, range(5, 8), threads=threads)
    assert list(ahead) == [5, 6, 7]
    for _ in range(3):  # no more steps than there are
        begun.acquire()
    ahead.close()
    assert exits == ["at once"] and not begun.acquire(blocking=False)
    answer.set()


def test_new_credentials_are_asked_for(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("keys/a", b"content")
    place = location(store.address("keys")) / "a"
    assert isinstance(place, StorePath)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "expired")
    files = Store(store.address("keys"))
    store.fault(b"Credential=expired", "403", times=10**9)
    timer = threading.Timer(0.5, os.environ.update, [{"AWS_ACCESS_KEY_ID": "renewed"}])
    timer.start()
    assert files.retry(lambda: files.read("a"), threading.Event(), 200) == b"content"


# The cache


def cached(tmp_path: Path, size: int, processes: int = 1) -> ChunkCache:
    return ChunkCache(tmp_path / "cache", size, processes)


def read_chunk(cache: ChunkCache, key: str, content: bytes, fetched: list[str] | None = None) -> bytes:
    """Return a chunk of the cache; note the key if it was fetched."""

    def fetch(_: int) -> bytes:
        if fetched is not None:
            fetched.append(key)
        return content

    file: Any = SimpleNamespace(keys=[key], cuts=[500, 500 + len(content)], fetch=fetch)
    target = bytearray(len(content))
    cache.get(file, 0).read_into(memoryview(target), 500)
    return bytes(target)


def files_of(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache" / "chunks").rglob("*.chunk"))


def test_the_folder_is_bounded_and_what_was_used_last_stays(tmp_path: Path) -> None:
    caches = [cached(tmp_path, 10_000), cached(tmp_path, 10_000)]  # of two processes, or of two runs
    for number in range(40):
        key = f"{number:08x}"
        assert read_chunk(caches[number % 2], key, bytes([number]) * 900) == bytes([number]) * 900
        os.utime(tmp_path / "cache" / "chunks" / key[:2] / f"{key}.chunk", (number + 10, number + 10))
        if number > 1:  # in use
            os.utime(tmp_path / "cache" / "chunks" / "00" / "00000001.chunk", (10**6, 10**6))
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 10_000
    names = [path.stem for path in files_of(tmp_path)]
    assert len(names) >= 9 and {"00000001", "00000027", "00000026"} <= {*names}
    other: list[str] = []
    assert read_chunk(cached(tmp_path, 10_000), "00000027", bytes([39]) * 900, other) == bytes([39]) * 900
    assert not other  # the next start uses it


def test_other_files_in_the_cache_folder_stay_and_a_cache_below_a_chunk_does_no_harm(tmp_path: Path) -> None:
    own = [tmp_path / "cache" / name for name in ("en/part.arrow", "de/part.chunk", "chunks/en/part.arrow")]
    for path in own:
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(9000))
    for number in range(40):
        read_chunk(cached(tmp_path, 5000), f"{number:08x}", bytes(900))
    assert [path.stat().st_size for path in own] == [9000] * 3
    fetched: list[str] = []
    for _ in range(2):
        assert read_chunk(cached(tmp_path, 100), "abcd", bytes(900), fetched) == bytes(900)
    assert len(fetched) == 2


def test_the_memory_is_bounded_and_divided_among_the_processes() -> None:
    cache, fetched = ChunkCache(None, 10_000, processes=2), list[str]()
    for _ in range(2):
        for number in range(5):
            read_chunk(cache, str(number), bytes(1000), fetched)
    assert len(fetched) == 5
    for number in range(20):
        read_chunk(cache, str(number), bytes(1000), fetched)
    assert len(fetched) == 20 and cache.fetched_bytes == 20_000


@pytest.mark.parametrize("fault", ["cut", "flipped", "empty", "unfinished"])
def test_a_damaged_or_half_written_chunk_does_not_count(fault: str, tmp_path: Path) -> None:
    content, fetched = bytes(range(256)) * 4, list[str]()
    read_chunk(cached(tmp_path, 10_000), "abcd", content, fetched)
    (path,) = files_of(tmp_path)
    if fault == "unfinished":
        path.rename(path.with_name(".1234.chunk"))
        os.utime(path.with_name(".1234.chunk"), (0, 0))
    else:
        damaged = bytearray(path.read_bytes())
        damaged[100] ^= fault == "flipped"
        path.write_bytes(damaged[: {"cut": 500, "empty": 0}.get(fault, len(damaged))])
    again = cached(tmp_path, 10_000)
    assert read_chunk(again, "abcd", content, fetched) == content and len(fetched) == 2
    for number in range(20):
        read_chunk(again, f"{number:04x}", content)
    assert not list((tmp_path / "cache").rglob(".*.chunk"))


def test_a_chunk_whose_file_becomes_unreadable_is_fetched_again(root: Path, tmp_path: Path, store: ObjectStore) -> None:
    cache = {"data_cache_path": str(tmp_path / "cache")}
    config = settings(store.upload(root, tmp_path.name), tmp_path, **cache)
    expected = first_steps(settings(root, tmp_path))
    with loader(config, plan(6)) as batches:
        found = [rows(batch) for batch in islice(batches, 12)]
        for path in files_of(tmp_path):
            os.truncate(path, 1)
        found += [rows(batch) for batch in islice(batches, 12)]
    assert found == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_training_goes_on_without_a_disk_for_the_cache(
    code: int,
    root: Path,
    tmp_path: Path,
    store: ObjectStore,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write, full = Path.open, tmp_path / "cache"

    def fail(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if path.is_relative_to(full) and path.name.startswith(".") and path.suffix == ".chunk":
            raise OSError(code, os.strerror(code), str(path))
        return write(path, mode, *arguments, **named)

    monkeypatch.setattr(Path, "open", fail)
    config = settings(store.upload(root, tmp_path.name), tmp_path, data_cache_path=str(full))
    assert first_steps(config) == first_steps(settings(root, tmp_path))
    assert caplog.text.count("the cache cannot be used") == 1 and os.strerror(code) in caplog.text


@pytest.mark.parametrize(("size", "warns"), [("1GB", False), ("25GB", False), ("24GB", True), ("7GB", True)])
def test_a_cache_below_the_working_set_is_said_and_one_far_below_it_refused(
    size: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, here = DataConfig(data_cache_size=size), Processes(0, 16, 0, 8, torch.device("cpu"))
    needed = 25 * 10**9
    if size == "1GB":
        problem = "--data_cache_size=1GB is less than the 25.0 GB of data .* less than a quarter of them"
        with pytest.raises(ConfigError, match=problem):
            check_cache(needed, config, here)
        return
    check_cache(needed, config, here)
    assert ("is less than the 25.0 GB" in caplog.text) == warns


def test_chunks_end_with_blocks_and_one_fetch_serves_all_who_wait(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "LARGEST_CHUNK_BYTES", 50_000)
    write_documents(tmp_path / "data" / "web" / "a.arrow", random_documents(5000, largest=60))
    config = settings(store.upload(tmp_path / "data", tmp_path.name), tmp_path)
    datasets = opened(config)
    (dataset,) = datasets.datasets
    size = dataset.files.sizes[0]
    cuts = store_files.ChunkCuts(dataset.index, [size]).of_file(0)
    assert {0, size, *dataset.index.documents["offset"][1024::1024].tolist()} <= {*cuts.tolist()}
    assert np.diff(cuts).max() <= 50_000 and np.diff(cuts).min() > 0
    with build_loader(datasets, config, plan(6), 0, 7, 1000) as batches:
        list(islice(batches, 300))
    assert datasets.chunks is not None
    assert 0.5 * size < datasets.chunks.fetched_bytes <= size and datasets.chunks.fetches <= len(cuts) - 1
    assert working_set_bytes(datasets, config) == size  # 8 shards of 5 blocks
