"""An input whose files are replaced by others of the same size is another input: refused, or prepared again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import fsspec
import pytest
from unit.tools.prepare.prepare_files import (
    contents,
    json_lines,
    prepare_config,
    prepare_killed,
    rows,
    texts_of,
    write_table,
)

from pretraining.data.tokenizer import load_tokenizer, train_tokenizer
from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import records, units
from pretraining.tools.prepare.hub import HubSplit, read_shards, shards_of
from pretraining.tools.prepare.prepare import prepare
from pretraining.tools.prepare.records import INPUTS_FILE

TEXTS = [f"document {number:03} of an input that changes" for number in range(60)]


WRITERS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.jsonl": lambda path, texts: path.write_bytes(json_lines(texts)),
    "a.parquet": lambda path, texts: write_table(path, {"text": texts}, 10),
    "a.arrow": lambda path, texts: write_table(path, {"text": texts}, 10),
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 600)


@pytest.fixture
def config(tmp_path: Path) -> PrepareConfig:
    """An input of several parts, whose file may change, and one that does not."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.jsonl").write_bytes(json_lines(TEXTS[:5]))
    train_tokenizer(TEXTS, 300).save(tmp_path)
    return prepare_config(tmp_path, "in", text_field="text", tokenizer_path=str(tmp_path), num_workers=1)


def exchange(path: Path, texts: list[str], write: Callable[[Path, list[str]], object]) -> None:
    """Rewrite a file with other content of the same size, and with its time."""
    before = path.stat()
    write(path, texts)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGED = [*(text.replace("document", "decument") for text in TEXTS[:10]), *TEXTS[10:]]


@pytest.mark.parametrize("name", WRITERS)
def test_a_changed_input_is_refused_by_name_and_the_old_one_is_prepared(name: str, config: PrepareConfig) -> None:
    path, write = Path(config.input_path[0]) / name, WRITERS[name]
    write(path, TEXTS)
    summary = prepare(config)
    made = contents(config.output_path)
    exchange(path, CHANGED, write)
    with pytest.raises(DataError, match=rf"other text \(changed in content: {name}\)\. Choose another --dataset"):
        prepare(config)
    (summary.folder / INPUTS_FILE).unlink()
    with pytest.raises(DataError, match="it was prepared from other text"):
        prepare(config)
    write(path, TEXTS)
    prepare(config)
    made[f"in/{INPUTS_FILE}"] = (summary.folder / INPUTS_FILE).read_bytes()  # which has times
    assert contents(config.output_path) == made


def test_an_input_with_new_times_is_read_once(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(config.input_path[0]) / "a.jsonl"
    path.write_bytes(json_lines(TEXTS))
    prepare(config)
    reads = Mock(side_effect=records.read_content)
    monkeypatch.setattr(records, "read_content", reads)
    counts = []
    for change in (lambda: None, path.touch, lambda: None):
        change()
        prepare(config)
        counts.append(reads.call_count)
    assert counts[0] == 0 and counts[1] == counts[2] > 3


def test_an_interrupted_preparation_encodes_again_what_has_changed(
    config: PrepareConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pretraining")
    path, write = Path(config.input_path[0]) / "a.jsonl", WRITERS["a.jsonl"]
    write(path, TEXTS)
    assert prepare_killed(config, "after", 12)
    exchange(path, CHANGED, write)
    there = replace(config, output_path=f"{config.output_path}_elsewhere")
    assert rows(prepare(config).folder) == rows(prepare(there).folder)
    assert "a.jsonl has changed since it was encoded: encoding it again" in caplog.text


# Hugging Face datasets, from local folders

DOCUMENTS = [f"document {n} of a dataset" for n in range(10)]
ANY_SIZE = 1 << 30


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the Hub, and what the library stores goes away."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", cache)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data files: two of training, one of validation."""
    path = tmp_path / "mine"
    path.mkdir()
    (path / "train-00000.jsonl").write_bytes(json_lines(DOCUMENTS[:4]))
    (path / "train-00001.jsonl").write_bytes(json_lines(DOCUMENTS[4:]))
    (path / "validation.jsonl").write_bytes(json_lines(["held out"]))
    return path


def texts_in(split: HubSplit, wanted_bytes: int = ANY_SIZE) -> list[str]:
    ranges = shards_of(split, wanted_bytes)[0]
    return texts_of(document for bounds in ranges for document in read_shards(split, "text", *bounds))


@pytest.mark.parametrize("wanted_bytes", [ANY_SIZE, 100])
def test_a_folder_of_save_to_disk_is_read_in_ranges_of_rows(tmp_path: Path, wanted_bytes: int) -> None:
    whole = datasets.Dataset.from_dict({"id": list(range(12)), "text": ["x", *DOCUMENTS, "x"]}).select(range(1, 11))
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": whole, "test": whole.select([3, 1])}).save_to_disk(tmp_path / "dict")
    assert texts_in(HubSplit(str(tmp_path / "one"), None, "train"), wanted_bytes) == DOCUMENTS
    assert texts_in(HubSplit(str(tmp_path / "dict"), None, "train"), wanted_bytes) == DOCUMENTS
    assert texts_in(HubSplit(str(tmp_path / "dict"), None, "test"), wanted_bytes) == [DOCUMENTS[3], DOCUMENTS[1]]
    with pytest.raises(DataError, match=r"cannot be opened: .*dev.*--hf_split"):
        texts_in(HubSplit(str(tmp_path / "dict"), None, "dev"))


@pytest.mark.parametrize(
    ("change", "path", "what"),
    [
        ({"hf_split": "test"}, "mine (test)", "'train', 'validation'"),
        ({"hf_config": "en"}, "mine, en (train)", "Available: ['default']"),
        ({"hf_dataset": "/nowhere/at/all"}, "all (train)", "--hf_dataset"),
        ({"text_field": "body"}, "mine (train)", "'text' (string)"),
        ({"hf_split": "without the package"}, "", "pretraining[hf]"),
    ],
)
def test_a_missing_hub_dataset_is_named_with_the_existing_ones(
    folder: Path, change: dict[str, Any], path: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not path:
        monkeypatch.setitem(sys.modules, "datasets", None)
    config = PrepareConfig(**{"hf_dataset": str(folder), "output_path": str(folder / "out"), **change})
    with pytest.raises(DataError) as error:
        prepare(config)
    assert (error.value.path.name if error.value.path else "") == path
    assert what in str(error.value)


def test_a_hub_dataset_is_identified_by_its_files_and_their_revision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    load = datasets.load_dataset

    def load_of_hub(path: str, *args: Any, **named: Any) -> Any:
        asked.append((path, *args))
        return load(str(folder), *args[1:], **named)

    def builder_of_hub(path: str, config: str | None) -> Any:
        files = [f"memory://datasets/{path}@{revision}/train-{n}.jsonl" for n in range(2)]
        for file in files:
            with fsspec.open(file, "wb") as stream:
                stream.write(b"x" * 300)
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": files, "test": files[:1]}))

    monkeypatch.setattr(datasets, "load_dataset", load_of_hub)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder_of_hub)
    split = HubSplit("someone/web", "en", "train")
    revision = "1111"
    first = shards_of(split, ANY_SIZE)
    revision = "2222"
    assert shards_of(split, ANY_SIZE)[1] != first[1]
    assert first[0] == [(0, 1, 300), (1, 2, 300)]
    assert texts_in(split) == DOCUMENTS
    assert set(asked) == {("someone/web", "en")}


def test_a_dataset_becomes_token_files_of_several_units(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    config = PrepareConfig(hf_dataset=str(folder), output_path=str(folder.parent / "out"))
    summary = prepare(config)
    tokenizer = load_tokenizer(config.output_path)
    assert [tokenizer.decode(row) for row in rows(summary.folder)] == DOCUMENTS
    assert (summary.folder.name, len(summary.files), summary.documents) == ("mine", 2, 10)
    assert prepare(config) == summary
    exchange(folder / "train-00001.jsonl", [*DOCUMENTS[4:9], DOCUMENTS[9].upper()], WRITERS["a.jsonl"])
    with pytest.raises(DataError, match="it was prepared from other text"):
        prepare(config)
    WRITERS["a.jsonl"](folder / "train-00001.jsonl", DOCUMENTS[4:])
    moved = folder.rename(folder.with_name("moved"))
    config = replace(config, hf_dataset=str(moved), dataset="mine")
    assert prepare(config) == summary, "the place of the files is not compared"
    (moved / "train-00002.jsonl").write_bytes(json_lines(["more"]))
    with pytest.raises(DataError, match="input_files: it has 2, requested is 3"):
        prepare(config)
    (moved / "train-00002.jsonl").write_text("{nonsense")
    with pytest.raises(DataError, match=r"moved \(train\): it cannot be read: \w+: "):
        prepare(replace(config, output_path=f"{config.output_path}_other"))
