from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import random_documents, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage import token_format
from pretraining.data.storage.arrow import ArrowFormat, ArrowStreamFormat
from pretraining.data.storage.token_format import DocumentLayout
from pretraining.errors import DataError


def layout_of(path: Path) -> DocumentLayout:
    return ArrowFormat(DataConfig()).documents(str(path))


def write(path: Path, *batches: dict[str, pa.Array] | pa.RecordBatch, **options: Any) -> None:
    """Writes record batches of one schema."""
    made = [pa.record_batch(batch) if isinstance(batch, dict) else batch for batch in batches]
    with pa.ipc.new_file(str(path), made[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in made:
            writer.write_batch(batch)


def documents_at(path: Path, layout: DocumentLayout) -> list[list[int]]:
    """The tokens that a layout points to."""
    content = path.read_bytes()
    return [
        np.frombuffer(content, f"<u{layout.width}", length, offset).tolist()
        for offset, length in zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True)
    ]


TOKEN_TYPES = [pa.uint8(), pa.int8(), pa.uint16(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 120), max_size=9)), max_size=30),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([*LIST_TYPES, None]),
    st.sampled_from(TOKEN_TYPES),
    st.booleans(),
    st.booleans(),
)
def test_documents_are_found_in_every_layout_and_missing_ones_are_empty(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int] | None],
    batch_documents: int,
    list_type: type | None,
    token: pa.DataType,
    is_mapped: bool,
    is_stream: bool,
) -> None:
    path = tmp_path_factory.mktemp("arrow") / "x.arrow"
    if list_type is None:  # lists of a fixed size
        documents = [[*(document or ()), 1, 2, 3][:3] for document in documents]
    tokens = pa.array(documents, pa.list_(token, 3) if list_type is None else list_type(token))
    table = pa.record_batch({"kind": pa.array(["a"] * len(documents)).dictionary_encode(), "tokens": tokens})
    with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        for begin in range(0, len(documents) + 1, batch_documents):
            writer.write_batch(table.slice(begin, batch_documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_format, "_SMALL_FILE_BYTES", 0 if is_mapped else 10**6)
        layout = (ArrowStreamFormat if is_stream else ArrowFormat)(DataConfig()).documents(str(path))
    assert documents_at(path, layout) == [document or [] for document in documents]
    assert layout.width == token.bit_width // 8


@pytest.mark.parametrize("token", TOKEN_TYPES)
@pytest.mark.parametrize("nullable", [True, False])
def test_record_batches_of_plain_integers_are_documents(tmp_path: Path, token: pa.DataType, nullable: bool) -> None:
    documents = [[], *random_documents(60, vocab_size=120), [], [7] * 5000, [9]]
    path = tmp_path / "x.arrow"
    schema = pa.schema([("number", pa.list_(pa.int16())), pa.field("tokens", token, nullable)])
    columns = [[pa.nulls(len(each) + 2, schema.types[0]), pa.array([1, *each, 2], token)] for each in documents]
    write(path, *(pa.record_batch(each, schema=schema).slice(1, len(each[0]) - 2) for each in columns))
    assert documents_at(path, layout_of(path)) == documents


LISTS = pa.list_(pa.uint16())
FIXED = pa.list_(pa.uint16(), 2)
DICTIONARIES = pa.list_(pa.dictionary(pa.int8(), pa.string()))
TOKENS = {"tokens": pa.array([[1]], LISTS)}


def write_stream(path: Path) -> None:
    batch = pa.record_batch(TOKENS)
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)


def encoded(lists: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), lists)


def twice(path: Path) -> None:
    write(path, pa.record_batch([pa.array([[1]], LISTS)] * 2, schema=pa.schema([("tokens", LISTS)] * 2)))


def turn_offsets_round(path: Path) -> None:
    write_documents(path, [[7] * 111, [8] * 222])
    good, bad = (struct.pack("<3i", 0, offset, 333) for offset in (111, 999))
    assert path.read_bytes().count(good) == 1
    path.write_bytes(path.read_bytes().replace(good, bad))


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_bytes(b"no arrow file at all, but long enough"),
    "a stream": write_stream,
    "no such column": lambda path: write(path, {"ids": TOKENS["tokens"]}),
    "two such columns": twice,
    "lists of fractions": lambda path: write(path, {"tokens": pa.array([[1.5]])}),
    "fractions": lambda path: write(path, {"tokens": pa.array([1.5])}),
    "lists of strings": lambda path: write(path, {"tokens": pa.array([["a"]])}),
    "strings": lambda path: write(path, {"tokens": pa.array(["a"])}),
    "compressed": lambda path: write(path, {"tokens": pa.array([[1] * 1000])}, compression="lz4"),
    "a null token": lambda path: write(path, TOKENS, {"tokens": pa.array([[3, None]], LISTS)}),
    "a null integer": lambda path: write(path, {"tokens": pa.array([3])}, {"tokens": pa.array([None], pa.int64())}),
    "offsets backwards": turn_offsets_round,
    "a null token in a fixed-size list": lambda path: write(path, {"tokens": pa.array([[3, None]], FIXED)}),
    "a null fixed-size list": lambda path: write(path, {"tokens": pa.array([[3, 4], None], FIXED)}),
    "a dictionary": lambda path: write(path, {"tokens": pa.array([1, 1, 2]).dictionary_encode()}),
    "a dictionary of lists": lambda path: write(path, {"tokens": encoded(pa.array([[1], [2, 3]], LISTS))}),
    "lists from a dictionary": lambda path: write(path, {"tokens": pa.array([["a"]], DICTIONARIES)}),
    "runs": lambda path: write(path, {"tokens": pc.run_end_encode(pa.array([1, 1, 2]))}),
}


OTHER_TYPES = {"lists of fractions", "fractions", "lists of strings", "strings", *list(UNUSABLE)[-4:]}


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, unusable: str) -> None:
    path = tmp_path / "x.arrow"
    UNUSABLE[unusable](path)
    with pytest.raises(DataError) as raised:
        layout_of(path)
    assert raised.value.path == path
    assert raised.value.settings == (("col_name",) if unusable == "no such column" else raised.value.settings)
    assert ("pretrain prepare" in str(raised.value)) == (unusable == "compressed")
    assert ("file_type" in raised.value.settings) == (unusable == "a stream")
    assert ("plain lists of integers" in str(raised.value)) == (unusable in OTHER_TYPES)
    assert raised.value.row == (0 if unusable == "offsets backwards" else None)


@pytest.mark.parametrize("is_broken", [False, True], ids=["named many times", "of no length"])
def test_a_footer_that_misnames_batches_fails(is_broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, open_file = tmp_path / "x.arrow", pa.ipc.open_file
    write(path, {"tokens": pa.array([[]] * 1000, LISTS)})

    class Misnaming:
        num_record_batches = 50

        def __init__(self, content: pa.Buffer) -> None:
            self.file = open_file(content)
            self.schema = self.file.schema

        def get_batch(self, number: int) -> pa.RecordBatch:
            if is_broken:
                raise SystemError("error return without exception set")
            return self.file.get_batch(0)

    monkeypatch.setattr(pa.ipc, "open_file", Misnaming)
    with pytest.raises(DataError) as raised:
        layout_of(path)
    assert raised.value.path == path


def test_a_truncated_stream_and_a_file_in_place_of_one_are_named(tmp_path: Path) -> None:
    path, stream = tmp_path / "x.arrow", ArrowStreamFormat(DataConfig())
    table = pa.record_batch({"tokens": pa.array(random_documents(50, vocab_size=200), LISTS)})
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        for begin in range(0, 50, 8):
            writer.write_batch(table.slice(begin, 8))
    assert len(stream.documents(str(path)).lengths) == 50
    content = path.read_bytes()
    for cut in (8, 9, 200):  # after whole record batches, pyarrow alone would find a shorter stream
        path.write_bytes(content[:-cut])
        with pytest.raises(DataError, match="ending of an Arrow stream"):
            stream.documents(str(path))
    write_documents(path, [[1]])
    with pytest.raises(DataError, match="files of one kind"):
        stream.documents(str(path))
