"""Parquet and Arrow files: text and token ids, a document a row."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather
from unit.tools.prepare.prepare_files import read, texts_of, write_table

from pretraining.errors import DataError
from pretraining.tools.prepare import tables
from pretraining.tools.prepare.documents import text_of
from pretraining.tools.prepare.formats import recognise
from pretraining.tools.prepare.packed_files import InputFile
from pretraining.tools.prepare.tables import column_type, ranges_of_table, token_type

TEXTS = ["first", None, "größer", "", "last"]
TOKENS = [[1, 2, 3], [], None, [70_000], [4]]


NAMES = ("a.parquet", "file.arrow", "stream.arrow", "a.feather")
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def write(path: Path, columns: dict[str, Any], rows: int = 2) -> InputFile:
    if path.suffix == ".feather":
        feather.write_feather(pa.table(columns), str(path), compression="zstd", chunksize=rows)
    else:
        write_table(path, columns, rows, as_stream=path.name == "stream.arrow")
    return recognise(path, path.name, path.stat().st_size)


def tokens_of(file: InputFile, column: str = "tokens", begin: int = 0, end: int | None = None) -> list[list[int]]:
    found = []
    for document in read(file, column, begin, end):
        assert isinstance(document.content, np.ndarray)
        found.append(document.content.tolist())
    return found


TEXT_TYPES = [
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_binary())),
    *(pa.run_end_encoded(pa.int32(), pa.string()), pa.json_()),
]
UNWRITABLE = {("a.parquet", TEXT_TYPES[8])}
"""Types that pyarrow does not write into a format."""


def encoded(kind: pa.DataType) -> pa.Array:
    """The texts, as a column of some type holds them."""
    if pa.types.is_run_end_encoded(kind):
        return pc.run_end_encode(pa.array(TEXTS))
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(TEXTS))
    if pa.types.is_dictionary(kind):
        return pa.array(TEXTS, kind.value_type).dictionary_encode().cast(kind)
    return pa.array([text if text is None else text.encode() for text in TEXTS], pa.binary()).cast(kind)


@EVERY_FORMAT
@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_a_column_of_strings_is_a_document_a_row_and_a_missing_one_is_empty(
    tmp_path: Path, name: str, kind: pa.DataType
) -> None:
    text = pa.chunked_array([encoded(kind)])
    if (name, kind) in UNWRITABLE:
        return
    file = write(tmp_path / name, {"id": range(5), "text": text, "more": [["x"]] * 5})
    found = read(file)
    assert texts_of(found) == ["first", "", "größer", "", "last"]
    assert token_type(column_type(file, "text"), "text", name) is None
    assert 0.8 * file.size <= sum(document.bytes_read for document in found) <= file.size or name == "stream.arrow"


@EVERY_FORMAT
@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.int32())], ids=str)
def test_a_column_of_lists_of_integers_is_token_ids(tmp_path: Path, name: str, kind: pa.DataType) -> None:
    file = write(tmp_path / name, {"text": ["a"] * 5, "tokens": pa.array(TOKENS, kind)})
    assert tokens_of(file) == [[1, 2, 3], [], [], [70_000], [4]]
    assert token_type(column_type(file, "tokens"), "tokens", name) == kind.value_type


@EVERY_FORMAT
def test_a_dotted_field_reaches_into_a_struct(name: str, tmp_path: Path) -> None:
    rows = [{"body": {"text": "a"}, "id": 1}, None, {"body": None, "id": 2}, {"body": {"text": "b"}, "id": 3}]
    file = write(tmp_path / name, {"doc": pa.array(rows), "id": [1, 2, 3, 4]})
    assert texts_of(read(file, "doc.body.text")) == ["a", "", "", "b"]
    for missing in ("doc.body.txt", "doc.id.text", "dc.text"):
        with pytest.raises(DataError, match=f"no column '{missing}'"):
            read(file, missing)


def test_a_dotted_field_reaches_into_json_objects_and_a_field_of_that_name_wins() -> None:
    assert text_of({"doc": {"body": {"text": "a"}}}, "doc.body.text") == "a"
    assert text_of({"doc.text": "b", "doc": {"text": "a"}}, "doc.text") == "b"
    assert text_of({"doc": None}, "doc.text") == ""
    for record in ({"doc": {"txt": "a"}}, {"doc": "a"}, {"a": "b"}):
        with pytest.raises(ValueError, match=r"no field 'doc\.text'"):
            text_of(record, "doc.text")


def test_lists_of_one_length_are_token_ids_too_and_two_columns_of_a_name_are_refused(tmp_path: Path) -> None:
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2))
    assert tokens_of(write(tmp_path / "a.parquet", {"tokens": fixed})) == [[1, 2], [], [3, 4]]
    for kind in (pa.list_view(pa.uint16()), pa.large_list_view(pa.int64())):
        file = write(tmp_path / "file.arrow", {"tokens": pa.array([[1, 2], None, [], [3]], kind)}, 3)
        assert tokens_of(file) == [[1, 2], [], [], [3]]
    file = write(tmp_path / "file.arrow", pa.Table.from_arrays([fixed, fixed], names=["tokens", "tokens"]))
    with pytest.raises(DataError):
        tokens_of(file)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    wanted=st.integers(1, 400),
    name=st.sampled_from(NAMES),
)
def test_the_ranges_of_a_table_cover_every_row_once_and_all_bytes(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], wanted: int, name: str
) -> None:
    path = tmp_path_factory.mktemp("table") / name
    documents = [[n] for n in range(sum(sizes))]
    file = write(path, {"tokens": pa.array(documents, pa.list_(pa.int32()))}, max(max(sizes), 1))
    ranges = ranges_of_table(file, wanted)
    assert [row for begin, end, _ in ranges for row in tokens_of(file, "tokens", begin, end)] == documents
    assert sum(size for _, _, size in ranges) == file.size
    assert [begin for begin, _, _ in ranges] == sorted({begin for begin, _, _ in ranges})


ROWS = pa.array([[1], [2], None, [], [3, 4, None], [5]], pa.list_(pa.int32()))
NOT_UTF8 = pa.Array.from_buffers(pa.string(), 2, pa.array([b"fine", b"so\xff"], pa.binary()).buffers())

# columns, the row that the error names, what it says
BAD: list[tuple[Any, int | None, str]] = [
    ({"body": ["a"], "input_ids": [[1]]}, None, "'body' (string), 'input_ids' (list"),
    ({"text": [1.5]}, None, "holds double"),
    ({"text": pa.array([b"abcd"], pa.binary(4))}, None, "--text_field"),
    ({"text": [["a", "b"]]}, None, "--text_field"),
    ({"text": ROWS}, 4, "null"),
    ({"text": NOT_UTF8}, 1, "not UTF-8"),
]


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize(("columns", "row", "what"), BAD, ids=range(len(BAD)))
def test_a_bad_column_is_refused_with_the_place(
    tmp_path: Path, name: str, columns: Any, row: int | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROWS_AT_ONCE", 2)
    file = write(tmp_path / name, columns, 3)
    with pytest.raises(DataError) as error:
        read(file)
    assert (error.value.path, error.value.row) == (file.path, row)
    assert what in str(error.value)


CHAT = [{"from": "human", "value": "a"}, {"from": "system", "value": "b"}]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
# a column, what a command makes of it, and the file that holds it
NESTED: list[tuple[pa.Array, list[object], str]] = [
    (pa.array([["a", "b"], ["c"]]), ["a\nb", "c"], "stream.arrow"),
    (pa.array([CHAT]), [MESSAGES], "a.parquet"),
]


@pytest.mark.parametrize(("column", "wanted", "name"), NESTED, ids=range(len(NESTED)))
def test_a_nested_column_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, column: pa.Array, wanted: list[object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / name, {"id": range(len(column)), "it's": column})
    with pytest.raises(DataError) as error:
        read(file, "it's")
    command = "python -c " + str(error.value).partition("python -c ")[2]
    program = shlex.split(command)
    assert program[:2] == ["python", "-c"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    exec(program[2])
    assert pq.read_table("converted.parquet")["converted"].to_pylist() == wanted


def test_rows_in_a_range_of_an_arrow_file_count_from_its_record_batch(tmp_path: Path) -> None:
    for name, place in (("a.parquet", "a.parquet, row 4:"), ("file.arrow", "file.arrow from record batch 1, row 1:")):
        with pytest.raises(DataError, match=place):
            tokens_of(write(tmp_path / name, {"tokens": ROWS}, 3), begin=1)


def flip(content: bytes) -> bytes:
    return content[:-20] + bytes(255 - byte for byte in content[-20:])


DAMAGES = (lambda content: content[: len(content) // 2], flip, lambda content: b"", lambda content: bytes(99))


@pytest.mark.parametrize(
    ("name", "damage"),
    # The last bytes of a stream are padding.
    [(name, damage) for name in NAMES for damage in DAMAGES if (name, damage) != ("stream.arrow", flip)],
)
def test_a_damaged_table_is_named(tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    file = write(path, {"text": [f"text {n} " * 9 for n in range(50)]}, 10)
    path.write_bytes(damage(path.read_bytes()))
    file = replace(file, size=path.stat().st_size)
    with pytest.raises(DataError) as error:
        column_type(file, "text")
        read(file)
    assert error.value.path == path
    if name != "stream.arrow":
        with pytest.raises(DataError):
            ranges_of_table(file, 1)
