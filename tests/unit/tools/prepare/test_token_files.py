"""Writing token files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pretraining.tools.prepare import token_files
from pretraining.tools.prepare.token_files import TokenWriter, token_dtype

UINT16 = np.dtype(np.uint16)


def read(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def write(writer: TokenWriter, *documents: np.ndarray) -> None:
    """Adds documents one at a time."""
    for document in documents:
        writer.write(document, np.array([len(document)]))


def test_a_row_a_document_in_record_batches_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "BATCH_TOKENS", 10)
    lengths = [3, 0, 12, 1, 1, 4, 9]
    documents = [np.arange(length, dtype=np.uint16) for length in lengths]
    with TokenWriter(tmp_path, UINT16, tokens_per_file=1000) as writer:
        write(writer, *documents)
    table = read(tmp_path / "part_000000.arrow")
    assert table.column_names == ["tokens"]
    assert table.schema.field("tokens").type == pa.list_(pa.uint16())
    assert table["tokens"].to_pylist() == [document.tolist() for document in documents]
    assert [len(chunk) for chunk in table["tokens"].chunks] == [3, 4]


def test_a_new_file_starts_at_the_first_document_past_the_size_limit(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, UINT16, tokens_per_file=5) as writer:
        for length in (4, 3, 20, 1):
            write(writer, np.zeros(length, dtype=UINT16))
    assert [(file.name, file.documents, file.tokens) for file in writer.files] == [
        ("part_000000.arrow", 2, 7),
        ("part_000001.arrow", 1, 20),
        ("part_000002.arrow", 1, 1),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name for file in writer.files]
    assert [(tmp_path / file.name).stat().st_size for file in writer.files] == [file.bytes for file in writer.files]


def test_an_unfinished_file_never_has_its_final_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TokenWriter(tmp_path, UINT16, tokens_per_file=5) as writer:
        write(writer, np.zeros(7, dtype=UINT16), np.zeros(2, dtype=UINT16))
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["part_000000.arrow"]


def test_tokens_are_16_bits_wide_if_the_vocabulary_allows() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32
