from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.sampling.token_stream import Spans
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.dataset_files import list_datasets
from pretraining.data.storage.document_reader import DocumentReader
from pretraining.data.storage.index_folder import build_index
from pretraining.data.storage.open_files import OpenFile, open_files
from pretraining.errors import DataError

ARROW = ArrowFormat(DataConfig())


def reader(
    root: Path, sep_token: int | None = None, vocab_size: int = 1000, limit: int | None = None
) -> DocumentReader:
    config = DataConfig(data_path=str(root), datasets=("web",), sep_token=sep_token)
    (files,) = list_datasets(config)
    return DocumentReader(files, build_index(files, config), config, vocab_size, open_files(limit))


Piece = tuple[int, int, int]  # document, start, length


def spans(rows: Sequence[Sequence[Piece]]) -> Spans:
    columns = zip(*(piece for pieces in rows for piece in pieces), strict=True)
    documents, starts, lengths = (np.array(column, dtype=np.int64) for column in columns)
    first_spans = np.cumsum([0, *(len(pieces) for pieces in rows)])
    return Spans(documents, starts, lengths, first_spans)


def read(made: DocumentReader, pieces: list[Piece], dtype: type = np.uint16) -> list[int]:
    row: np.ndarray = np.full((1, sum(length for _, _, length in pieces)), 77, dtype=dtype)
    made.read(spans([pieces]), row, np.array([0]))
    tokens: list[int] = row[0].tolist()
    return tokens


@st.composite
def documents_and_rows(draw: st.DrawFn) -> tuple[list[list[int]], list[list[Piece]]]:
    documents = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=12), min_size=1, max_size=8))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        pieces = []
        for _ in range(draw(st.integers(1, 6))):
            document = draw(st.integers(0, len(documents) - 1))
            length = len(documents[document]) + 1  # with the separator
            start = draw(st.integers(0, length - 1))
            pieces.append((document, start, draw(st.integers(1, length - start))))
        rows.append(pieces)
    return documents, rows


@settings(max_examples=60)
@given(
    documents_and_rows(),
    st.integers(0, 8),
    st.sampled_from(
        [(pa.uint16(), pa.uint16()), (pa.int32(), pa.int32()), (pa.uint16(), pa.uint32()), (pa.int64(), pa.uint8())]
    ),
    st.sampled_from([(np.uint16, 200), (np.int32, 70_000)]),  # a separator may be wider than the files' tokens
)
def test_rows_are_filled_with_pieces_of_documents_and_their_separators_and_with_zeros_behind(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[list[list[int]], list[list[Piece]]],
    cut: int,
    kinds: tuple[pa.DataType, pa.DataType],
    kind: tuple[type, int],
) -> None:
    (documents, rows), (dtype, sep) = drawn, kind
    root = tmp_path_factory.mktemp("reader")
    write_documents(root / "web/a.arrow", documents[:cut], pa.list_(kinds[0]), batch_documents=2)
    write_documents(root / "web/b.arrow", documents[cut:], pa.list_(kinds[1]))
    made = reader(root, sep_token=sep, vocab_size=sep + 1)
    width = max(sum(length for _, _, length in pieces) for pieces in rows)
    target: np.ndarray = np.full((len(rows) + 2, width), 77, dtype=dtype)
    numbers = np.roll(np.arange(len(rows)), 1) + 1  # any rows, in any order
    made.read(spans(rows), target, numbers)
    assert (target[[0, -1]] == 77).all()  # other rows stay
    for number, pieces in zip(numbers.tolist(), rows, strict=True):
        tokens = [token for document, start, length in pieces for token in [*documents[document], sep][start:][:length]]
        assert target[number].tolist() == tokens + [0] * (width - len(tokens))


def test_adjacent_short_documents_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = random_documents(200, largest=9)
    write_documents(tmp_path / "web/x.arrow", documents)
    made = reader(tmp_path)
    pieces = [(at, 0, len(documents[at])) for at in np.random.default_rng(0).permutation(200).tolist() if documents[at]]
    reads = Mock(wraps=os.preadv)
    monkeypatch.setattr(os, "preadv", reads)
    assert read(made, pieces) == [token for document, _, _ in pieces for token in documents[document]]
    assert reads.call_count == 2  # one to check the file


@pytest.mark.parametrize("kind", [pa.uint16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(tmp_path: Path, kind: pa.DataType, dtype: type) -> None:
    write_documents(tmp_path / "web/a.arrow", [[1, 2], [3]])
    bad = 65_535 if kind == pa.uint16() else 65_536 + 5  # cut to 16 bits, it would be 5
    write_documents(tmp_path / "web/b.arrow", [[4], [1, 2, bad, 3]], pa.list_(kind))
    made = reader(tmp_path)
    assert read(made, [(0, 0, 2), (1, 0, 1), (3, 0, 2)], dtype) == [1, 2, 3, 1, 2]
    with pytest.raises(DataError, match=f"token 2 of the document is {bad}, but") as raised:
        read(made, [(0, 0, 2), (3, 1, 3)], dtype)
    assert (raised.value.path, raised.value.row) == (tmp_path / "web/b.arrow", 1)


@pytest.mark.parametrize("kinds", [("i1",), ("i2",), ("i4",), ("i8",), ("i1", "u2"), ("i2", "u4"), ("i4", "i8")])
@pytest.mark.parametrize("vocab_size", [100, 128_256])
def test_a_negative_token_of_any_type_is_a_fault(tmp_path: Path, kinds: tuple[str, ...], vocab_size: int) -> None:
    for number, kind in enumerate(kinds):
        tokens = [1, 2, 99, 3, 99, 4, -100, 5] if number == 0 else [6, 99, 7]
        (tmp_path / "web").mkdir(exist_ok=True)
        np.save(tmp_path / f"web/{number}.npy", np.array(tokens, kind))
    made = reader(tmp_path, sep_token=99, vocab_size=vocab_size)
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    assert read(made, [(0, 0, 3), (1, 0, 1)], dtype) == [1, 2, 99, 3]
    for pieces in ([(2, 1, 1)], [(0, 0, 2), (1, 0, 1), (2, 0, 3)]):  # one read per piece, and one read per run
        with pytest.raises(DataError, match="token 1 of the document is -100, but") as raised:
            read(made, pieces, dtype)
        assert (raised.value.path, raised.value.row) == (tmp_path / "web/0.npy", 2)


def test_a_bounded_number_of_files_is_open(tmp_path: Path) -> None:
    for number in range(12):
        write_documents(tmp_path / f"web/{number:02}.arrow", [[number, number]])
    made = reader(tmp_path, limit=3)
    for _ in range(2):
        assert read(made, [(number, 0, 2) for number in range(12)]) == [n for n in range(12) for _ in range(2)]
    gc.collect()
    targets = [str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir()]
    assert sum(target.startswith(str(tmp_path)) and target.endswith(".arrow") for target in targets) <= 3
    path = str(tmp_path / "web/00.arrow")
    held = OpenFile(path, Path(path).stat().st_size, ARROW.ending)
    cache = open_files(1)
    assert cache.get("a", lambda: held) is held
    cache.get("b", lambda: OpenFile(path, Path(path).stat().st_size, ARROW.ending))
    target = bytearray(6)
    held.read_into(memoryview(target), 0)  # stays open while it is used
    assert target == b"ARROW1"


def test_partial_reads_are_completed_and_a_failing_disk_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = random_documents(3, largest=40)
    write_documents(tmp_path / "web/x.arrow", documents)
    made = reader(tmp_path)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, targets, offset: real(file, [targets[0][:3]], offset))
    assert read(made, [(2, 0, len(documents[2]))]) == documents[2]
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(DataError) as raised:
        read(made, [(2, 0, 3)])
    assert raised.value.path == tmp_path / "web/x.arrow"
