"""bos_token, sep_token, strip_tokens and min_length, against lists that are changed one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.stream_oracle import as_trained
from unit.data.token_files import write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.index import VIRTUAL_BOS, VIRTUAL_SEP, split_lengths
from pretraining.data.storage.index_files import documents_as_trained

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
