"""Text files and JSON lines, compressed or not, in units, and which text a tokenizer is trained on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.tools.prepare.prepare_files import json_lines, one, packed, read, texts_of

from pretraining.errors import DataError
from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare import encode, units, vocabulary
from pretraining.tools.prepare.packed_files import InputFile
from pretraining.tools.prepare.units import find_input
from pretraining.tools.prepare.vocabulary import training_sample


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
