"""Hugging Face datasets, from local folders."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.tools.prepare.prepare_files import json_lines, rows, texts_of

from pretraining.data.tokenizer import load_tokenizer
from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import units
from pretraining.tools.prepare.hub import HubSplit, read_shards, shards_of
from pretraining.tools.prepare.prepare import prepare

datasets = pytest.importorskip("datasets")
fsspec = pytest.importorskip("fsspec")

TEXTS = [f"document {n} of a dataset" for n in range(10)]
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
    (path / "train-00000.jsonl").write_bytes(json_lines(TEXTS[:4]))
    (path / "train-00001.jsonl").write_bytes(json_lines(TEXTS[4:]))
    (path / "validation.jsonl").write_bytes(json_lines(["held out"]))
    return path


def texts_in(split: HubSplit, wanted_bytes: int = ANY_SIZE) -> list[str]:
    ranges = shards_of(split, wanted_bytes)[0]
    return texts_of(document for bounds in ranges for document in read_shards(split, "text", *bounds))


@pytest.mark.parametrize("wanted_bytes", [ANY_SIZE, 100])
def test_a_folder_of_save_to_disk_is_read_in_ranges_of_rows(tmp_path: Path, wanted_bytes: int) -> None:
    whole = datasets.Dataset.from_dict({"id": list(range(12)), "text": ["x", *TEXTS, "x"]}).select(range(1, 11))
    whole.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": whole, "test": whole.select([3, 1])}).save_to_disk(tmp_path / "dict")
    assert texts_in(HubSplit(str(tmp_path / "one"), None, "train"), wanted_bytes) == TEXTS
    assert texts_in(HubSplit(str(tmp_path / "dict"), None, "train"), wanted_bytes) == TEXTS
    assert texts_in(HubSplit(str(tmp_path / "dict"), None, "test"), wanted_bytes) == [TEXTS[3], TEXTS[1]]
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
    assert texts_in(split) == TEXTS
    assert set(asked) == {("someone/web", "en")}


def test_a_file_that_cannot_be_read_is_an_error(folder: Path) -> None:
    split = HubSplit(str(folder), None, "train")
    shards_of(split, ANY_SIZE)
    (folder / "train-00001.jsonl").write_text("{nonsense")
    with pytest.raises(DataError, match=r"mine \(train\): it cannot be read: \w+: "):
        texts_in(split)


def test_a_dataset_becomes_token_files_of_several_units(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    config = PrepareConfig(hf_dataset=str(folder), output_path=str(folder.parent / "out"))
    summary = prepare(config)
    tokenizer = load_tokenizer(config.output_path)
    assert [tokenizer.decode(row) for row in rows(summary.folder)] == TEXTS
    assert (summary.folder.name, len(summary.files), summary.documents) == ("mine", 2, 10)
    assert prepare(config) == summary
    moved = folder.rename(folder.with_name("moved"))
    config = replace(config, hf_dataset=str(moved), dataset="mine")
    assert prepare(config) == summary, "the place of the files is not compared"
    (moved / "train-00002.jsonl").write_bytes(json_lines(["more"]))
    with pytest.raises(DataError, match="input_files: it has 2, requested is 3"):
        prepare(config)
