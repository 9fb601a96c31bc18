from __future__ import annotations

import struct
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import random_documents, write_batches, write_documents

from pretraining.config.training import DataConfig
from pretraining.data.storage import arrow, token_format
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.token_format import DocumentLayout
from pretraining.errors import DataError


def layout_of(path: Path) -> DocumentLayout:
    return ArrowFormat(DataConfig()).documents(str(path))


def documents_at(path: Path, layout: DocumentLayout) -> list[list[int]]:
    """The tokens that a layout points to."""
    content = path.read_bytes()
    return [
        np.frombuffer(content, f"<u{layout.width}", length, offset).tolist()
        for offset, length in zip(layout.offsets.tolist(), layout.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize("batch_documents", [1, 3, 1000])
@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
@pytest.mark.parametrize("token", [pa.uint8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()])
def test_documents_are_found_in_every_layout(
    tmp_path: Path, batch_documents: int, list_type: type, token: pa.DataType
) -> None:
    path, documents = tmp_path / "x.arrow", random_documents(50, vocab_size=200)
    write_documents(path, documents, list_type(token), batch_documents)
    layout = layout_of(path)
    assert documents_at(path, layout) == documents
    assert layout.width == token.bit_width // 8


@settings(max_examples=40)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 300), max_size=9)), max_size=30), st.integers(1, 8))
def test_empty_and_missing_documents_are_empty_ones(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int] | None], batch_documents: int
) -> None:
    path = tmp_path_factory.mktemp("arrow") / "x.arrow"
    write_documents(path, documents, batch_documents=batch_documents)
    assert documents_at(path, layout_of(path)) == [document or [] for document in documents]


@pytest.mark.parametrize("token", [pa.uint8(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()])
@pytest.mark.parametrize("nullable", [True, False])
def test_record_batches_of_plain_integers_are_documents(tmp_path: Path, token: pa.DataType, nullable: bool) -> None:
    documents = [[], *random_documents(60, vocab_size=200), [], [7] * 5000, [9]]
    path = tmp_path / "x.arrow"
    schema = pa.schema([("number", pa.list_(pa.int16())), pa.field("tokens", token, nullable)])
    with pa.ipc.new_file(str(path), schema) as writer:
        for document in documents:
            batch = [pa.nulls(len(document) + 2, schema.types[0]), pa.array([1, *document, 2], type=token)]
            writer.write_batch(pa.record_batch(batch, schema=schema).slice(1, len(document)))
    assert documents_at(path, layout_of(path)) == documents


def test_missing_tokens_among_plain_integers_are_refused_with_their_record_batch(tmp_path: Path) -> None:
    schema = pa.schema([("tokens", pa.uint32())])
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), schema) as writer:
        for tokens in ([1, 2], [3, None]):
            writer.write_batch(pa.record_batch([pa.array(tokens, type=pa.uint32())], schema=schema))
    with pytest.raises(DataError, match=r"has missing tokens \(null\) in record batch 1"):
        layout_of(tmp_path / "x.arrow")


def test_large_files_are_mapped_and_small_ones_read_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(300)
    write_documents(tmp_path / "x.arrow", documents, batch_documents=90)
    for small in (0, 10**6):
        monkeypatch.setattr(token_format, "_SMALL_FILE_BYTES", small)
        layout = layout_of(tmp_path / "x.arrow")
        assert documents_at(tmp_path / "x.arrow", layout) == documents


def test_the_schema_of_like_files_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(wraps=arrow._parse)
    monkeypatch.setattr(arrow, "_parse", parse)
    arrow._locate.cache_clear()
    for number in range(20):
        documents = random_documents(6, seed=number)
        write_documents(tmp_path / f"{number}.arrow", documents, batch_documents=2)
        path = tmp_path / f"{number}.arrow"
        assert documents_at(path, layout_of(path)) == documents
    assert parse.call_count == 1
    for number in range(3):  # each is told of by its own name
        write_documents(tmp_path / f"bad{number}.arrow", [[1]], column="ids")
        with pytest.raises(DataError, match=rf"bad{number}\.arrow has no column 'tokens'"):
            layout_of(tmp_path / f"bad{number}.arrow")


def test_schemas_of_very_many_record_batches_are_not_remembered(tmp_path: Path) -> None:
    arrow._locate.cache_clear()
    documents = random_documents(1000)
    write_documents(tmp_path / "x.arrow", documents, batch_documents=1)
    path = tmp_path / "x.arrow"
    assert documents_at(path, layout_of(path)) == documents
    assert arrow._locate.cache_info().currsize == 0


def test_many_batches_of_which_some_differ(tmp_path: Path) -> None:
    documents = random_documents(9000, largest=3)
    path = tmp_path / "x.arrow"
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))])
    with pa.ipc.new_file(str(path), schema) as writer:
        for number, document in enumerate(documents):
            batch = pa.record_batch([pa.array([document], type=schema.types[0])], schema=schema)
            if number % 500 == 3:
                writer.write_batch(batch.slice(0, 0))  # no rows: metadata of another shape
            writer.write_batch(batch)
    assert documents_at(path, layout_of(path)) == documents


def test_slices_of_longer_columns(tmp_path: Path) -> None:
    documents = random_documents(40)
    column = pa.array([[1, 2], *documents, [3]], type=pa.list_(pa.uint16())).slice(1, 40)
    schema = pa.schema([("tokens", column.type)])
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    assert documents_at(path, layout_of(path)) == documents


def test_other_columns_may_come_before(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [4]]
    columns = {
        "text": pa.array(["a", None, "ccc"]),
        "number": pa.array([1.5, 2.5, None]),
        "flag": pa.array([True, False, None]),
        "nothing": pa.nulls(3),
        "meta": pa.array([{"a": 1, "b": ["x"]}, None, {"a": 3, "b": []}]),
        "map": pa.array([[("k", 1)], [], None], type=pa.map_(pa.string(), pa.int64())),
        "pair": pa.array([[1, 2], [3, 4], None], type=pa.list_(pa.int16(), 2)),
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        "time": pa.array([1, 2, 3], type=pa.timestamp("s")),
        "fixed": pa.array([b"12", None, b"56"], type=pa.binary(2)),
        "decimal": pa.array([1, None, 3], type=pa.decimal128(9, 2)),
        "tokens": pa.array(documents, type=pa.list_(pa.int32())),
        "after": pa.array([1, 2, 3]),
    }
    path = tmp_path / "x.arrow"
    batch = pa.record_batch(columns)
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch.slice(1, 2))
    assert documents_at(path, layout_of(path)) == documents + documents[1:]


def test_a_column_that_cannot_be_passed_over_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    batch = pa.record_batch({"view": pa.array(["a"], type=pa.string_view()), "tokens": pa.array([[1]])})
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"x\.arrow has a column of type string_view before the tokens"):
        layout_of(path)


def test_a_file_without_documents(tmp_path: Path) -> None:
    write_documents(tmp_path / "x.arrow", [])
    assert len(layout_of(tmp_path / "x.arrow").lengths) == 0


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))] * 2)
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([[1]], schema.types[0])] * 2, schema=schema))
    with pytest.raises(DataError, match=r"x\.arrow has 2 columns 'tokens', and nothing says which one is meant"):
        layout_of(tmp_path / "x.arrow")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    write_documents(tmp_path / "x.arrow", [[1]], column="input_ids")
    with pytest.raises(DataError, match=r"x\.arrow has no column 'tokens', but input_ids: give --col_name"):
        layout_of(tmp_path / "x.arrow")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.string()), pa.float32(), pa.string()])
def test_a_column_of_another_type_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    path = tmp_path / "x.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("tokens", kind)])):
        pass
    with pytest.raises(
        DataError, match=r"x\.arrow has a column 'tokens' of type .*, but documents are lists of integers"
    ):
        layout_of(path)


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    batch = pa.record_batch({"tokens": pa.array([[1] * 1000])})
    with pa.ipc.new_file(str(path), batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"x\.arrow is compressed"):
        layout_of(path)


def test_missing_tokens_are_refused_with_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))])
    with pa.ipc.new_file(str(path), schema) as writer:
        for rows in ([[1], [2]], [[3, None]]):
            writer.write_batch(pa.record_batch([pa.array(rows, type=schema.types[0])], schema=schema))
    with pytest.raises(DataError, match=r"has missing tokens \(null\) in rows from 2 on"):
        layout_of(path)


def test_streams_are_told_from_files(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    batch = pa.record_batch({"tokens": pa.array([[1]])})
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(DataError, match=r"x\.arrow is an Arrow stream"):
        layout_of(path)


def test_other_files_and_missing_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_bytes(b"no arrow file at all, but long enough")
    with pytest.raises(DataError, match=r"x\.arrow is truncated or damaged"):
        layout_of(tmp_path / "x.arrow")
    with pytest.raises(DataError, match=r"cannot read .*y\.arrow: No such file"):
        layout_of(tmp_path / "y.arrow")


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    whole = tmp_path / "whole.arrow"
    write_documents(whole, random_documents(30), batch_documents=4)
    content = whole.read_bytes()
    path = tmp_path / "x.arrow"
    for size in (0, 1, 9, 17, 100, len(content) // 2, len(content) - 7, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match=r"x\.arrow is (truncated or )?damaged"):
            layout_of(path)


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.uint16()])
def test_a_file_with_a_flipped_byte_gives_documents_inside_it_or_an_error_that_names_it(
    tmp_path: Path, kind: pa.DataType
) -> None:
    whole = tmp_path / "whole.arrow"
    if kind == pa.uint16():
        write_batches(whole, [[1, 2, 3], [4], [], [5, 6]], kind)
    else:
        write_documents(whole, [[1, 2, 3], [4], [], [5, 6]], batch_documents=2)
    content = bytearray(whole.read_bytes())
    path = tmp_path / "x.arrow"
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 0xFF
        path.write_bytes(flipped)
        try:
            layout = layout_of(path)
        except DataError as error:
            assert "x.arrow" in str(error)
        else:
            ends = layout.offsets + layout.lengths * layout.width
            assert (layout.offsets >= 0).all() and (ends <= len(content)).all()


def test_list_offsets_that_go_backwards_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_documents(path, [[7] * 111, [8] * 222])
    content = path.read_bytes()
    offsets = struct.pack("<3i", 0, 111, 333)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<3i", 0, 999, 333)))
    with pytest.raises(DataError, match=r"x\.arrow is damaged: row 0 lies outside the tokens"):
        layout_of(path)
