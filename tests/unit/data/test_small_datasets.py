"""Extreme datasets: tiny ones over thousands of passes, and empty files and documents."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, plan, rows, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage.index import BLOCK_DOCUMENTS
from pretraining.errors import DataError


def write_numbered(root: Path, files: list[list[int]], batch_documents: int) -> int:
    """Write documents of given lengths without a repeated token; return the number of tokens."""
    token = 0
    for number, lengths in enumerate(files):
        documents = []
        for length in lengths:
            documents.append(range(token, token + length))
            token += length
        write_documents(root / f"web/{number:03}.arrow", documents, batch_documents=batch_documents)
    return token


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 30)), max_size=12), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([1, 3, 10**9]),
)
@example([[0, 0, 0], [], [5, 0], [0], [0, 0, 9], []], 5, 2, 1)
@example([[0] * (2 * BLOCK_DOCUMENTS + 5), [3], [0] * BLOCK_DOCUMENTS, [2]], 3, 2, 10**9)
def test_every_token_comes_once_per_pass_beside_empty_datasets(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], shards: int, seq_length: int, batch: int
) -> None:
    root = tmp_path_factory.mktemp("data")
    total = write_numbered(root, files, batch)
    asked = DataConfig(data_path=str(root), seq_length=seq_length, logical_shards=shards, num_workers=0)
    if total <= seq_length:
        with pytest.raises(DataError):
            loader(asked, plan(1))
        return
    passes = 2 * seq_length  # then no shard has tokens left, and a sample has started at every position
    made = loader(asked, plan(total))
    seen = Counter(token for _ in range(2) for row in rows(next(made)) for token in row[:-1])
    assert seen == dict.fromkeys(range(total), passes)
