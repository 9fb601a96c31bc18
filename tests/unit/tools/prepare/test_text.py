"""Text files and JSON lines, compressed or not."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from unit.tools.prepare.prepare_files import documents_of, json_lines, one, packed

from pretraining.errors import DataError
from pretraining.tools.prepare import text as text_module
from pretraining.tools.prepare.inputs import InputFile
from pretraining.tools.prepare.text import Piece, cut_text, read_lines, read_text

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read(file: InputFile, field: str = "text") -> list[Piece]:
    return list(read_text(file) if file.kind == "text" else read_lines(file, field))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path, ending: str) -> None:
    name = f"a.txt{ending}"
    file = one(tmp_path / name, packed(name, "\ufeffline\r\n\n größer\n".encode()))
    assert documents_of(read(file)) == ["line\r\n\n größer\n"]
    assert documents_of(read(one(tmp_path / name, packed(name, b"")))) == [""]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines_are_a_document_each(tmp_path: Path, ending: str) -> None:
    name = f"a.jsonl{ending}"
    lines = "".join(json.dumps({"id": n, "body": f"text {n} ü"}) + "\n\n" for n in range(3)).encode()
    file = one(tmp_path / name, packed(name, b"\xef\xbb\xbf" + lines))
    assert documents_of(read(file, "body")) == ["text 0 ü", "text 1 ü", "text 2 ü"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_parts_behind_each_other_are_one_file(tmp_path: Path, name: str) -> None:
    content = packed(name, json_lines(["a", "b"])) + packed(name, json_lines(["c"]))
    assert documents_of(read(one(tmp_path / name, content))) == ["a", "b", "c"]


def test_a_missing_text_is_an_empty_document(tmp_path: Path) -> None:
    file = one(tmp_path / "a.jsonl", b'{"text": null}\n{"text": ""}\n{"text": "a"}')
    assert documents_of(read(file)) == ["", "", "a"]


@given(
    texts=st.lists(st.text(alphabet="aü\n ", max_size=12), max_size=12),
    blank=st.sampled_from([b"", b"\n", b"\r\n", b" \n\n"]),
    cuts=st.lists(st.floats(0, 1), max_size=4),
)
def test_ranges_give_every_line_to_exactly_one_of_them(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], blank: bytes, cuts: list[float]
) -> None:
    content = b"".join(line + blank for line in json_lines(texts).splitlines(keepends=True))
    file = one(tmp_path_factory.mktemp("lines") / "a.jsonl", content)
    bounds = [0, *sorted(int(cut * len(content)) for cut in cuts), len(content)]
    ranges = [list(read_lines(file, "text", begin, end)) for begin, end in pairwise(bounds)]
    assert documents_of(piece for some in ranges for piece in some) == texts


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst"])
def test_bytes_read_grow_to_the_size_of_the_file(tmp_path: Path, name: str) -> None:
    words = ["word " * 300_000] * 4
    content = "".join(words).encode() if "txt" in name else json_lines(words)
    file = one(tmp_path / name, packed(name, content))
    found = read(file)
    assert len(found) > 3
    assert sum(piece.bytes_read for piece in found) == file.size


def test_a_long_document_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 50)
    long = "größe und maß " * 40 + "x" * 200
    for file in (one(tmp_path / "a.txt", long), one(tmp_path / "a.jsonl", json.dumps({"text": long}))):
        found = read(file)
        assert documents_of(found) == [long]
        assert max(len(piece.content) for piece in found) <= 50


LINES = json_lines(["some text that compresses well"] * 9999)

BAD = [
    ("latin.txt", "abc größe".encode("latin-1"), r"latin\.txt: not UTF-8 at byte 6 \(0xf6"),
    ("cut.txt", "abc ö".encode()[:-1], r"not UTF-8 at byte 4 .*unexpected end"),
    ("x.txt.gz", gzip.compress(b"\xff"), r"byte 0 of the unpacked text"),
    ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"x\.jsonl, line 2: not UTF-8 at byte 24"),
    ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not valid JSON"),
    ("x.jsonl", b"[" * 100_000, r"x\.jsonl, line 1: not valid JSON"),
    ("x.jsonl", b"[1]\n", r"line 1: a JSON object .* this is a list"),
    ("x.jsonl", b'{"body": "a", "id": 1}\n', r"line 1: no field 'text'\. The fields are: 'body', 'id'; .*--text_field"),
    ("x.jsonl", b'{"text": 7}\n', r"line 1: field 'text' must be a string, this is 7"),
    ("x.jsonl", b'{"text": "\\ud800"}\n', r"line 1: .*half of a surrogate pair at character 0"),
    ("x.jsonl.gz", b"no gzip", r"no complete gzip file: after 0 bytes of text"),
    ("x.jsonl.gz", gzip.compress(LINES)[:-9], r"no complete gzip file: after [\d,]{6,} bytes of text"),
    ("x.txt.zst", b"not zstd", r"no complete zstd file: after 0 bytes of text"),
    ("x.jsonl.zst", packed("x.zst", LINES)[:-9], r"no complete zstd file: after [\d,]{6,} bytes of text, Truncated"),
    ("x.txt.zst", packed("x.zst", LINES)[:-1], r"no complete zstd file: after 0 bytes of text, Truncated"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(one(tmp_path / name, content))


def test_the_place_in_a_range_is_a_byte(tmp_path: Path) -> None:
    content = json_lines(["a"] * 10) + b"nonsense\n"
    with pytest.raises(DataError, match=rf"the line at byte {len(content) - 9}: not valid JSON"):
        list(read_lines(one(tmp_path / "a.jsonl", content), "text", 20, len(content)))


def test_the_place_of_a_bad_byte_is_right_far_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 64)
    with pytest.raises(DataError, match=r"at byte 1,001 "):
        read(one(tmp_path / "a.txt", "ö".encode() * 500 + b"a\xff" + b"b" * 100))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.zst"])
def test_a_file_that_vanishes_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name} cannot be read: No such file"):
        read(InputFile(tmp_path / name, name, 1))


def test_what_a_disk_says_without_a_number_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = one(tmp_path / "a.txt", "text")

    def fail(path: Path, mode: str) -> None:
        raise OSError("the disk is on fire")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: the disk is on fire"):
        read(file)


# Long documents in pieces


@pytest.mark.parametrize(
    "words_of",
    [
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated"),
    ],
    ids=["gpt2", "llama3"],
)
@given(
    text=st.text(alphabet=st.one_of(st.sampled_from("ab1 \n\r.'é漢_\t"), st.characters(codec="utf-8")), max_size=100)
)
def test_a_cut_goes_through_no_word_of_the_usual_tokenizers(words_of: pre_tokenizers.PreTokenizer, text: str) -> None:
    for match in text_module._SAFE_CUT.finditer(text):
        parts = text[: match.start()], text[match.start() :]
        words = [word for part in parts for word, _ in words_of.pre_tokenize_str(part)]
        assert words == [word for word, _ in words_of.pre_tokenize_str(text)]


@given(text=st.text(alphabet="ab \n", max_size=300), limit=st.integers(1, 40))
def test_pieces_make_the_text_again_and_only_the_last_ends_it(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "PIECE_CHARACTERS", limit)
        found = list(cut_text(text))
    assert "".join(part for part, _ in found) == text
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    assert max(len(part) for part, _ in found) <= limit
