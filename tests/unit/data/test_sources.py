"""Finding files of text and reading documents from them."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from pretraining.data import sources
from pretraining.data.sources import TextFile, fingerprint, list_files, read_pieces
from pretraining.errors import DataError

ENDINGS = ("txt", "jsonl", "jsonl.gz")


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")


def names(files: list[TextFile]) -> list[str]:
    return [file.name for file in files]


def documents(file: TextFile, field: str = "text") -> list[str]:
    found = [""]
    for piece in read_pieces(file, field):
        found[-1] += piece.text
        if piece.ends_document:
            found.append("")
    assert found.pop() == "", "the last piece must end a document"
    return found


def one(path: Path, content: bytes | str) -> TextFile:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list_files([str(path)], ())[0]


def test_a_folder_is_walked_to_the_bottom_in_the_order_of_names(tmp_path: Path) -> None:
    tree(tmp_path, "b.txt", "a/z.txt", "a/deep/er/x.jsonl", "c.TXT", "no.pdf", ".hidden.txt", ".git/x.txt", "a-b.txt")
    assert names(list_files([str(tmp_path)], ENDINGS)) == ["a/deep/er/x.jsonl", "a/z.txt", "a-b.txt", "b.txt", "c.TXT"]


def test_files_and_globs_are_taken_whatever_their_ending(tmp_path: Path) -> None:
    tree(tmp_path, "one.rst", "x/b.py", "x/y/a.py", "x/y/c.txt")
    assert names(list_files([str(tmp_path / "one.rst"), str(tmp_path / "x/**/*.py")], ENDINGS)) == [
        "one.rst",
        "b.py",
        "y/a.py",
    ]


def test_a_name_with_brackets_is_a_name_where_there_is_such_a_file(tmp_path: Path) -> None:
    tree(tmp_path, "a[1].txt")
    assert names(list_files([str(tmp_path / "a[1].txt")], ENDINGS)) == ["a[1].txt"]


def test_each_file_counts_once_and_links_do_not_lead_in_circles(tmp_path: Path) -> None:
    tree(tmp_path, "in/a.txt", "elsewhere/b.txt")
    (tmp_path / "in/circle").symlink_to(tmp_path / "in")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/again.txt").symlink_to(tmp_path / "in/a.txt")
    assert names(list_files([str(tmp_path / "in")], ENDINGS)) == ["a.txt", "linked/b.txt"]


@pytest.mark.parametrize(
    ("given_input", "message"),
    [
        ("nowhere", "no file or folder .*nowhere"),
        ("*.none", "holds no text"),
        ("empty", r"searched for \.txt, .*--extensions"),
    ],
)
def test_an_input_without_text_is_refused(tmp_path: Path, given_input: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        list_files([str(tmp_path / given_input)], ENDINGS)


def test_an_input_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, "a.txt")
    with pytest.raises(DataError, match="not listed already"):
        list_files([str(tmp_path), str(tmp_path / "a.txt")], ENDINGS)


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt cannot be read"):
        list_files([str(tmp_path)], ENDINGS)


def test_a_folder_that_cannot_be_searched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"cannot be read: Permission denied.*--input_path"):
        list_files([str(tmp_path)], ENDINGS)


def test_the_fingerprint_knows_names_sizes_and_order() -> None:
    a, b = TextFile(Path("x/a"), "a", 1), TextFile(Path("x/b"), "b", 2)
    assert fingerprint([a, b]) == fingerprint([TextFile(Path("y/a"), "a", 1), b])
    assert len({fingerprint(files) for files in ([a, b], [b, a], [a], [a, TextFile(Path("x/b"), "b", 3)])}) == 4


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path) -> None:
    assert documents(one(tmp_path / "a.txt", "\ufeffline\r\n\n größer\n".encode())) == ["line\r\n\n größer\n"]
    assert documents(one(tmp_path / "b.txt.gz", gzip.compress(b"packed"))) == ["packed"]
    assert documents(one(tmp_path / "empty.txt", b"")) == [""]


def test_json_lines_are_a_document_each(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"id": n, "body": f"text {n} ü"}) + "\n\n" for n in range(3)).encode()
    expected = ["text 0 ü", "text 1 ü", "text 2 ü"]
    assert documents(one(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + rows), "body") == expected
    assert documents(one(tmp_path / "a.jsonl.gz", gzip.compress(rows)), "body") == expected


def test_bytes_read_grow_to_the_size_of_the_file(tmp_path: Path) -> None:
    text = "word " * 1_000_000
    for name, content in (("a.txt", text.encode()), ("a.txt.gz", gzip.compress(text.encode()))):
        file = one(tmp_path / name, content)
        pieces = list(read_pieces(file))
        assert len(pieces) > 3
        assert sum(piece.bytes_read for piece in pieces) == file.size


LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
def test_cutting_a_long_document_cuts_no_word(words_of: pre_tokenizers.PreTokenizer, text: str) -> None:
    cut = sources._cut(text)
    assert 0 < cut <= len(text) or not text
    parts = [word for part in (text[:cut], text[cut:]) for word, _ in words_of.pre_tokenize_str(part)]
    assert parts == [word for word, _ in words_of.pre_tokenize_str(text)]


def test_a_long_document_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 50)
    text = "größe und maß " * 40 + "x" * 200
    for file in (one(tmp_path / "a.txt", text), one(tmp_path / "a.jsonl", json.dumps({"text": text}))):
        pieces = list(read_pieces(file))
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert max(len(piece.text) for piece in pieces) <= 50


BAD = [
    ("latin.txt", "abc größe".encode("latin-1"), r"latin\.txt: not UTF-8 at byte 6 \(0xf6"),
    ("cut.txt", "abc ö".encode()[:-1], r"not UTF-8 at byte 4 .*unexpected end"),
    ("x.txt.gz", gzip.compress(b"\xff"), r"byte 0 of the unpacked text"),
    ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"x\.jsonl, line 2: not UTF-8 at byte 24"),
    ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not valid JSON"),
    ("x.jsonl", b"[1]\n", r"line 1: a JSON object .* this is a list"),
    ("x.jsonl", b'{"body": "a", "id": 1}\n', r"line 1: no field 'text'\. The fields are: 'body', 'id'; .*--text_field"),
    ("x.jsonl", b'{"text": null}\n', r"line 1: field 'text' must be a string, this is null"),
    ("x.jsonl", b'{"text": "\\ud800"}\n', r"line 1: .*half of a surrogate pair at character 0"),
    ("x.jsonl.gz", b"no gzip", r"no complete gzip file"),
    ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-9], r"no complete gzip file"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        documents(one(tmp_path / name, content))


def test_the_place_of_a_bad_byte_is_right_far_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", 64)
    with pytest.raises(DataError, match=r"at byte 1,001 "):
        documents(one(tmp_path / "a.txt", "ö".encode() * 500 + b"a\xff" + b"b" * 100))


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
        documents(TextFile(tmp_path / "a.txt", "a.txt", 1))
