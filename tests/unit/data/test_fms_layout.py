"""Folders as fms-fsdp lays them out, which train unchanged: documents are record batches, counts lie in `meta`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from unit.data.sampling.stream_oracle import as_trained
from unit.data.token_files import loader, opened, plan, random_documents, rows, write_batches, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.dataset import build_indices
from pretraining.data.storage.dataset_files import list_datasets

X, Y = "lang=en/dataset=x", "lang=en/dataset=y"
SEP, BOS = 999, 998
DOCUMENTS = {
    X: [random_documents(40, seed=1), random_documents(25, seed=2)],
    Y: [random_documents(30, seed=3), [[1, 2, SEP], [], [SEP], [BOS, 5]]],
}


@pytest.fixture(params=[pa.uint32(), pa.int32(), pa.list_(pa.uint32()), pa.list_(pa.int32())], ids=str)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Documents as record batches of plain integers, as it writes them today, or of one list."""
    counts = ["dataset/filename,documents,tokens"]
    for name, parts in DOCUMENTS.items():
        for number, documents in enumerate(parts):
            path = f"{name}/part={number}/shard_{number}.arrow"
            if pa.types.is_list(request.param):
                write_documents(tmp_path / path, documents, request.param, batch_documents=1)
            else:
                write_batches(tmp_path / path, documents, request.param)
            counts.append(f"/{path},{len(documents)},{sum(map(len, documents))}")
    write_counts(tmp_path, counts)
    return tmp_path


def write_counts(folder: Path, lines: list[str]) -> None:
    (folder / "meta").mkdir(exist_ok=True)
    (folder / "meta/combined_counts.csv").write_text("".join(f"{line}\n" for line in lines))


def config(root: Path) -> DataConfig:
    return DataConfig(
        data_path=str(root),
        datasets=(X, Y),
        seq_length=1,
        sep_token=SEP,
        bos_token=BOS,
        logical_shards=3,
        num_workers=0,
    )


Said = Callable[[DataConfig], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Makes indices; returns what is said meanwhile, but for the lines that they are made."""
    caplog.set_level(logging.INFO, "pretraining")

    def said(config: DataConfig) -> list[str]:
        caplog.clear()
        build_indices(list_datasets(config), config)
        return [line for line in caplog.messages if not line.startswith("indexing")]

    return said


def test_every_document_is_trained_on_once_a_pass(root: Path) -> None:
    whole = {
        name: [as_trained(document, SEP, BOS) for documents in parts for document in documents]
        for name, parts in DOCUMENTS.items()
    }
    tokens = {name: sum(map(len, documents)) for name, documents in whole.items()}
    settings = config(root)
    assert {each.files.name: each.tokens("train") for each in opened(settings).datasets} == tokens
    for name, documents in whole.items():
        alone = loader(replace(settings, datasets=(name,)), plan(tokens[name]))
        first = sorted(row[0] for row in rows(next(alone)))
        assert first == sorted(token for document in documents for token in document)
    both = loader(settings, plan(64))
    next(both)
    assert both.state_dict()["counts"].keys() == {X, Y}


def test_counts_that_contradict_the_files_are_told_in_a_line(root: Path, said: Said) -> None:
    place = root / "meta/combined_counts.csv"
    path = "part=0/shard_0.arrow"
    right = sum(map(len, DOCUMENTS[X][0]))
    write_counts(
        root,
        [
            "dataset/filename,documents,tokens",
            f"/bucket/{X}/{path},41,{right}",
            f"{X}/part=1/lost.arrow,3,4",
            f"{X}/part=1/notes.txt,3,4",
            f"lang=de/dataset=x/{path},7,7",
        ],
    )
    (root / X / "part=1/notes.txt").write_text("other files may be counted, too")
    (line,) = said(config(root))
    assert (
        str(place) in line and f"{path} has 40 documents of {right:,} tokens, not 41" in line and "lost.arrow" in line
    )
    assert "notes" not in line and "lang=de" not in line
    assert said(config(root)) == []  # once, as the index is made
    write_counts(root / "lang=en", ["dataset/filename,documents,tokens", "/dataset=y/part=1/shard_1.arrow,5,6"])
    assert len(said(replace(config(root), min_length=2))) == 2  # those beside a nested dataset are seen, too


@pytest.mark.parametrize("lines", [["file,tokens", "a,1"], ["dataset/filename,documents,tokens", f"{X}/a.arrow,many,"]])
def test_counts_that_cannot_be_read_are_told_and_nothing_is_stopped(root: Path, said: Said, lines: list[str]) -> None:
    assert said(replace(config(root), min_length=2)) == []  # the counts are right
    write_counts(root, lines)
    assert all("combined_counts.csv cannot be read" in line for line in said(config(root)))
    assert opened(config(root)).training_tokens > 0
