"""What a file is, by its content first and by its name second."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
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
from unit.tools.prepare.prepare_files import json_lines, one, packed, read, texts_of, write_table

from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare import documents, encode, formats, tables, units, vocabulary
from pretraining.tools.prepare.documents import text_of
from pretraining.tools.prepare.formats import recognise
from pretraining.tools.prepare.packed_files import InputFile
from pretraining.tools.prepare.tables import column_type, ranges_of_table, token_type
from pretraining.tools.prepare.units import find_input
from pretraining.tools.prepare.vocabulary import training_sample

TEXTS = ["first", "größer", "", "line\nline", "last"]
ENDINGS = ["", ".gz", ".zst", ".bz2", ".xz", ".lz4"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json", "a.jsonl", "a.txt", "a"])
def test_json_lines_are_records_whatever_the_name_of_their_file(tmp_path: Path, name: str, ending: str) -> None:
    content = packed(f"a{ending}", json_lines(TEXTS))
    assert texts_of(read(one(tmp_path / f"{name}{ending}", content))) == TEXTS
    assert texts_of(read(one(tmp_path / name, content))) == TEXTS, "the content says how it is packed, too"


def test_a_first_line_longer_than_the_probe_is_read_completely(tmp_path: Path) -> None:
    texts = ["long " * formats.HEAD_BYTES, "short"]
    for name in ("a.json", "a.json.gz"):
        assert texts_of(read(one(tmp_path / name, packed(name, json_lines(texts))))) == texts


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_a_record_per_object(tmp_path: Path, indent: int | None, ending: str) -> None:
    array = json.dumps([{"id": [1, "]"], "text": text} for text in TEXTS], indent=indent)
    content = packed(f"a{ending}", b"\xef\xbb\xbf \n" + array.encode())
    assert texts_of(read(one(tmp_path / f"a.json{ending}", content))) == TEXTS
    objects = "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)  # one after another
    assert texts_of(read(one(tmp_path / "a.json", objects))) == TEXTS


@given(records=st.lists(st.text(max_size=9).map(lambda text: {"text": text}), min_size=1), block=st.integers(1, 60))
def test_a_json_array_reads_the_same_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, str]], block: int
) -> None:
    file = one(tmp_path_factory.mktemp("array") / "a.json", json.dumps(records, ensure_ascii=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_JSON_BLOCK", block)
        assert texts_of(read(file)) == [record["text"] for record in records]


def test_json_and_csv_are_one_document_each_on_request(tmp_path: Path) -> None:
    for name, content in (("a.json", '{"text": "a"}\n'), ("a.csv", "text\na\n"), ("b.json", '[{"text": "a"}]')):
        (tmp_path / name).write_text(content)
        file = recognise(tmp_path / name, name, len(content), as_text=True)
        assert texts_of(read(file)) == [content]


def test_a_table_is_recognised_under_any_file_name(tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS})
    pq.write_table(table, tmp_path / "a.jsonl")
    with pa.ipc.new_stream(str(tmp_path / "a.txt"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.jsonl", "a.txt"):
        assert texts_of(read(recognise(tmp_path / name, name, 1))) == TEXTS


def test_a_text_that_begins_like_a_format_is_a_text(tmp_path: Path) -> None:
    for text in ("ORCHESTRA", "PAR1S", "BZhang", "ARROW1 and", "FEA1", "LZIPped", "WARC/ISO", "PK", "{}s", "[{a}]"):
        assert texts_of(read(one(tmp_path / "a.txt", text))) == [text]
    for name in ("a.txt", "a.bz2"):
        assert texts_of(read(one(tmp_path / name, packed("a.bz2", b"")))) == [""]


# What is not read


def archive(kind: str) -> bytes:
    """Return a tar or a zip archive of a file of JSON lines."""
    sink = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(sink, "w") as packed_files:
            packed_files.writestr("a.jsonl", LINES)
    else:
        with tarfile.open(fileobj=sink, mode="w") as packed_files:
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(LINES)
            packed_files.addfile(info, io.BytesIO(LINES))
    return sink.getvalue()


LINES = json_lines(TEXTS)
TAR = archive("tar")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 99\n"
TABLE = pa.BufferOutputStream()
pq.write_table(pa.table({"text": TEXTS}), TABLE)
LONG_WINDOW = bytes.fromhex("28b52ffd04a86900007b2274657874223a2261227d0aaea9718c")  # by zstd --long=31
MANY_LINES = json_lines(["some text that compresses well"] * 9999)
# name and content of a file that is no text, what the error says it is, and the remedy
FORMATS: list[tuple[str, bytes, str, str]] = [
    ("a.tar", TAR, "a tar archive", "tar -xf"),
    ("a.tar.gz", gzip.compress(TAR), "a tar archive inside gzip", "mkdir"),
    ("a.txt", archive("zip"), "a zip archive", "unzip"),
    ("a.7z", b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive", "7z x"),
    ("a.json.br", b"\x8b\x03\x80abc", "compressed by brotli", "brotli -d"),
    ("a.txt.Z", b"\x1f\x9d\x90", "a rare format", "Unpack it"),
    ("a.txt.sz", b"\xff\x06\x00\x00sNaPpY", "compressed by snappy", "snzip -d"),
    ("a.txt.gz", gzip.compress(gzip.compress(LINES)), "gzip inside gzip", "Unpack it first"),
    ("a.parquet.gz", gzip.compress(bytes(TABLE.getvalue())), "Parquet inside gzip", "Unpack it first"),
    ("a.warc.gz", gzip.compress(b"WARC/1.0\r\n"), "a WARC file", "JSON lines"),
    ("wiki.xml.bz2", packed("a.bz2", b"<mediawiki xmlns"), "a MediaWiki dump", "wikiextractor"),
    ("a.orc", b"ORC\0\0", "an ORC or Feather 1 file", "Parquet"),
    ("a.pdf", b"%PDF-1.7", "a PDF", "pdftotext"),
    ("a.csv", b"text\na\n", "it is CSV, which", "to_parquet"),
    ("a.tsv.gz", gzip.compress(b"text\na\n"), "it is TSV inside gzip", "sep='\\t', quoting=3, dtype=str"),
    ("a.npy", b"\x93NUMPY\1\0", "a NumPy file", ".npy"),
    (".hidden", b"PK\3\4", "a zip archive", "/hidden-unpacked"),
    ("archive", b"PK\3\4", "a zip archive", "/archive-unpacked"),
    ("a.txt", "text".encode("utf-16"), "UTF-16", "iconv -f UTF-16 -t UTF-8"),
    ("a.jsonl", POINTER, "a Git LFS pointer", "git lfs pull"),
    *((f"a.txt{ending}", b"", f"ends with {ending}", "Fetch it again") for ending in ENDINGS[1:]),
    ("a.json.gz", b"<html>404</html>", "ends with .gz", "Fetch it again"),
    ("a.jsonl.gz", gzip.compress(MANY_LINES)[:-9], "", "fetch it again"),
    ("a.jsonl.zst", packed("a.zst", MANY_LINES)[:-9], "", "fetch it again"),
    ("a.jsonl.zst", LONG_WINDOW, "too much memory", "zstd -d --long=31"),
    ("a.txt", "abc größe".encode("latin-1"), "at byte 6 (0xf6", ""),
    ("a.txt", "abc ö".encode()[:-1], "at byte 4 ", ""),
    ("a.txt", "ö".encode() * 500 + b"a\xff" + b"b" * 100, "at byte 1,001 ", ""),
    ("a.txt.gz", gzip.compress(b"\xff"), "at byte 0 of the unpacked text", ""),
]
OTHER_FIELD, ARRAYS = "field 'text' holds ", "text follows the array; jq -c '.[]'"
CHAT = '{"text": [{"from": "gpt", "value": "a"}]}'
# name and content of a file with a bad record, its row, what the error says
RECORDS: list[tuple[str, str | bytes, int, str]] = [
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', 2, "at byte 24 "),
    ("a.jsonl", '{"text": "a"}\n\n{"text": \n', 3, "not valid JSON"),
    ("a.jsonl", "[" * 100_000, 1, "not valid JSON"),
    ("a.jsonl", "[1]\n", 1, "it is [1], not a JSON object"),
    ("a.jsonl", '{"body": "a", "id": 1}\n', 1, "The fields are: 'body', 'id'"),
    ("a.jsonl", '{"text": "\\ud800"}\n', 1, "half of a surrogate pair (\\ud800)"),
    ("a.jsonl", '{"text": ["a", "b"]}', 1, "Set another --text_field"),
    ("a.jsonl", '{"text": {"id": 1, "body": "a"}}', 1, "--text_field=a.b reads the field b of an object a"),
    ("a.jsonl", CHAT, 1, """jq -c '.["text"] |= map({role: ({human: """),
    *((name, b'{"text": "cut\n' + LINES, 1, "not valid JSON") for name in ("a.json", "a.json.gz", "a.txt")),
    *(
        ("a.jsonl", '[{"text": "a"}]' + more, 2, ARRAYS)
        for more in ('\n[{"text": "b"}]', '{"text": ""}', " " * 99 + "]")
    ),
    ("a.json", '[{"text": "a"}, {"text": 12}]', 2, f"{OTHER_FIELD}12, not text"),
    ("a.json", '[{"text": "a"}, {"text": NaN}]', 2, "holds NaN"),
    ("a.json", '[{"text": "a"}, {"text": ', 2, "not valid JSON"),
    ("a.json", '["a", "b"]', 1, 'it is "a", not a JSON object'),
    ("a.json", '{\n "data": [{"text": "a"}]\n}', 1, "The fields are: 'data'"),
]
REFUSED: list[tuple[str, str | bytes, int | None, str, str]] = [
    *((name, content, None, words, remedy) for name, content, words, remedy in FORMATS),
    *((name, content, row, words, "") for name, content, row, words in RECORDS),
]


@pytest.mark.parametrize(("name", "content", "row", "words", "remedy"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_is_not_read_is_refused_with_its_place_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str | bytes, row: Any, words: str, remedy: str
) -> None:
    monkeypatch.setattr(documents, "_JSON_BLOCK", 20)
    content = packed(name, content) if row else content
    with pytest.raises(DataError) as error:
        read(one(tmp_path / name, content))
    assert (error.value.path, error.value.row) == (tmp_path / name, row)
    assert words in str(error.value) and remedy in str(error.value)


def test_the_command_that_unpacks_makes_a_folder_that_is_read(tmp_path: Path) -> None:
    place = tmp_path / "my texts"
    place.mkdir()
    with pytest.raises(DataError) as error:
        one(place / "a.tar", TAR)
    command = str(error.value).partition("give the folder: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert (place / "a.tar-unpacked" / "a.jsonl").read_bytes() == LINES


# Parquet and Arrow files: text and token ids, a document per row

COLUMN = ["first", None, "größer", "", "last"]
TOKENS = [[1, 2, 3], [], None, [60_000], [4]]


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
        return pc.run_end_encode(pa.array(COLUMN))
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(COLUMN))
    if pa.types.is_dictionary(kind):
        return pa.array(COLUMN, kind.value_type).dictionary_encode().cast(kind)
    return pa.array([text if text is None else text.encode() for text in COLUMN], pa.binary()).cast(kind)


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
def test_a_dotted_field_reaches_into_a_struct(name: str, tmp_path: Path) -> None:
    rows = [{"body": {"text": "a"}, "id": 1}, None, {"body": None, "id": 2}, {"body": {"text": "b"}, "id": 3}]
    file = write(tmp_path / name, {"doc": pa.array(rows), "id": [1, 2, 3, 4]})
    assert texts_of(read(file, "doc.body.text")) == ["a", "", "", "b"]
    for missing in ("doc.body.txt", "doc.id.text", "dc.text"):
        with pytest.raises(DataError, match=f"no column '{missing}'"):
            read(file, missing)
    assert text_of({"doc": {"body": {"text": "a"}}}, "doc.body.text") == "a"  # of a JSON object
    assert text_of({"doc.text": "b", "doc": {"text": "a"}}, "doc.text") == "b" and text_of({"doc": None}, "doc.a") == ""
    with pytest.raises(ValueError, match=r"no field 'doc\.text'"):
        text_of({"doc": {"txt": "a"}}, "doc.text")


LIST_TYPES = [
    pa.list_(pa.int64()),
    pa.large_list(pa.uint32()),
    pa.list_view(pa.uint16()),
    pa.large_list_view(pa.int64()),
]


@pytest.mark.parametrize("kind", LIST_TYPES, ids=str)
def test_a_column_of_lists_of_integers_is_token_ids(tmp_path: Path, kind: pa.DataType) -> None:
    for name in NAMES if pa.types.is_list(kind) or pa.types.is_large_list(kind) else ["file.arrow"]:
        file = write(tmp_path / name, {"tokens": pa.array(TOKENS, kind), "ids": [1] * 5}, 3)
        assert tokens_of(file) == [[1, 2, 3], [], [], [60_000], [4]]
        assert token_type(column_type(file, "tokens"), "tokens", name) == kind.value_type
    fixed = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2))
    assert tokens_of(write(tmp_path / "a.parquet", {"tokens": fixed})) == [[1, 2], [], [3, 4]]
    with pytest.raises(DataError):  # two columns of one name
        tokens_of(write(tmp_path / "file.arrow", pa.Table.from_arrays([fixed, fixed], names=["tokens", "tokens"])))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12), wanted=st.integers(1, 400), name=st.sampled_from(NAMES)
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


TURNS = [{"from": "human", "value": "a"}, {"from": "system", "value": "b"}]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
# a column, what a command makes of it, and the file that holds it
NESTED: list[tuple[pa.Array, list[object], str]] = [
    (pa.array([["a", "b"], ["c"]]), ["a\nb", "c"], "stream.arrow"),
    (pa.array([TURNS]), [MESSAGES], "a.parquet"),
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


# Text files and JSON lines, compressed or not, and which text a tokenizer is trained on


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document_and_json_lines_are_one_each_without_byte_order_mark(
    tmp_path: Path, ending: str
) -> None:
    name = f"a.txt{ending}"
    file = one(tmp_path / name, packed(name, "\ufeffline\r\n\n größer\n".encode()))
    assert texts_of(read(file)) == ["line\r\n\n größer\n"]
    assert texts_of(read(one(tmp_path / name, packed(name, b"")))) == [""]
    name = f"a.jsonl{ending}"
    parts = [b'\xef\xbb\xbf{"id": 1, "body": "text \xc3\xbc"}\n\n{"body": null}\n', b'{"body": ""}\n{"body": "a"}']
    file = one(tmp_path / name, b"".join(packed(name, part) for part in parts))  # behind each other
    assert texts_of(read(file, "body")) == ["text ü", "", "", "a"]


@given(
    texts=st.lists(st.text(alphabet="aü\n ", max_size=12), max_size=12),
    blank=st.sampled_from([b"", b"\n", b"\r\n", b" \n\n"]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_every_line_belongs_to_exactly_one_range(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], blank: bytes, cuts: list[float]
) -> None:
    content = b"".join(line + blank for line in json_lines(texts).splitlines(keepends=True))
    file = one(tmp_path_factory.mktemp("lines") / "a.jsonl", content)
    bounds = [0, *sorted(int(cut * len(content)) for cut in cuts), len(content)]
    ranges = [read(file, "text", begin, end) for begin, end in pairwise(bounds)]
    assert texts_of(document for some in ranges for document in some) == texts


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    name = "a.txt.zst"
    with pytest.raises(DataError, match="No such file") as error:
        read(InputFile(tmp_path / name, name, 1))
    assert error.value.path == tmp_path / name


def test_a_tokenizer_is_trained_on_all_text_or_a_sample_of_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{n:03d} number of a text" for n in range(200)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    found = find_input(PrepareConfig(input_path=(str(tmp_path),)))
    assert sorted(training_sample(found, "text")) == texts
    monkeypatch.setattr(vocabulary, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 10)
    sample = list(training_sample(found, "text", characters=100))
    assert 90 < sum(map(len, sample)) <= 100 and max(map(len, sample)) <= 10
    numbers = [int(text[:3]) for text in sample if text[:3].isdecimal()]
    assert min(numbers) < 50 and max(numbers) > 150


def test_an_unterminated_value_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_JSON_BLOCK", 10)
    monkeypatch.setattr(documents, "LARGEST_VALUE_CHARACTERS", 100)
    taken = 0

    def read_some(count: int) -> str:
        nonlocal taken
        taken += count
        return "x" * count if taken > 20 else '[{"text": "'.ljust(10, " ")

    with pytest.raises(ValueError, match="line 1 column"):
        list(documents._json_values(read_some))
    assert taken < 400
