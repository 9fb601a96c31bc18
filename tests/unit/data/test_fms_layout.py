"""Folders as fms-fsdp lays them out, which train unchanged: documents are record batches, counts lie in `meta`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from unit.data.sampling.stream_oracle import as_trained
from unit.data.token_files import loader, opened, plan, random_documents, rows, write_batches, write_documents

from pretraining.config.training import DataConfig

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
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/combined_counts.csv").write_text("\n".join(counts))
    return tmp_path


def test_every_document_is_trained_on_once_a_pass(root: Path) -> None:
    whole = {
        name: [as_trained(document, SEP, BOS) for documents in parts for document in documents]
        for name, parts in DOCUMENTS.items()
    }
    tokens = {name: sum(map(len, documents)) for name, documents in whole.items()}
    settings = DataConfig(
        data_path=str(root), datasets=(X, Y), seq_length=1, sep_token=SEP, bos_token=BOS, num_workers=0
    )
    assert {each.files.name: each.tokens("train") for each in opened(settings).datasets} == tokens
    for name, documents in whole.items():
        alone = loader(replace(settings, datasets=(name,)), plan(tokens[name]))
        first = sorted(row[0] for row in rows(next(alone)))
        assert first == sorted(token for document in documents for token in document)
    both = loader(settings, plan(64))
    next(both)
    assert both.state_dict()["counts"].keys() == {X, Y}
