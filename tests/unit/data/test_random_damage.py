"""Files with random damage: an error that names the file, or tokens, but no crash, no hang and no other exception."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.token_files import loader, plan, random_documents, rows, write_flat, write_megatron

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import load_format
from pretraining.errors import DataError

NUMBERS = [b"\xff" * 8, b"\xff" * 7 + b"\x7f", bytes(8), b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\1", b"\x7f", b"\x80"]


EDITS = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 1), st.integers(1, 900)),  # a share of the file, or bytes before its end
        st.sampled_from([1, 1, 4, 8, 16, 255, 10**9]),  # bytes that go there
        st.one_of(st.sampled_from(NUMBERS), st.just(b""), st.binary(min_size=1, max_size=1), st.binary(max_size=40)),
    ),
    min_size=1,
    max_size=6,
)


def attack(content: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Overwrite, lose and insert bytes of a file, or cut its end off."""
    for where, gone, new in edits:
        at = int(where * len(content)) if isinstance(where, float) else max(len(content) - where, 0)
        content = content[:at] + new + content[at + gone :]
    return content


def write_kind(path: Path, kind: str) -> Path:
    """Write a small file of a kind of documents; return the file to damage."""
    documents = random_documents(40, largest=9)
    if kind in ("npy", "bin"):
        write_flat(path, documents, version=1)
        return path
    if kind == "megatron":
        write_megatron(path, documents, "<i4")
        return path.with_suffix(".idx")
    list_type, _, form = kind.partition(" ")
    is_fixed = list_type == "fixed"
    types = {"list": pa.list_(pa.uint16()), "view": pa.list_view(pa.int32()), "fixed": pa.list_(pa.uint16(), 3)}
    rows_written = [None, *([*each, 1, 2, 3][:3] if is_fixed else each for each in documents)]
    columns = {"kind": pa.array(["a"] * 41).dictionary_encode(), "tokens": pa.array(rows_written, types[list_type])}
    table = pa.record_batch(columns)
    with (pa.ipc.new_stream if form else pa.ipc.new_file)(str(path), table.schema) as writer:
        for begin in range(0, 41, 9):
            writer.write_batch(table.slice(begin, 9))
    return path


FILE_TYPES = {
    **{"npy": "npy", "bin": "bin", "megatron": "megatron", "view": "arrow", "fixed": "arrow"},
    **{"list stream": "arrow_stream", "view stream": "arrow_stream", "fixed stream": "arrow_stream"},
}


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_damaged_file_of_any_kind_is_read_inside_its_bytes_or_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "web" / {"npy": "x.npy", "bin": "x.bin", "megatron": "x.bin"}.get(kind, "x.arrow")
    path.parent.mkdir()
    damaged = write_kind(path, kind)
    content = damaged.read_bytes()
    config = DataConfig(data_path=str(tmp_path), file_type=FILE_TYPES[kind], seq_length=8, sep_token=999, num_workers=0)
    read = load_format(FILE_TYPES[kind], config).documents

    @settings(max_examples=100)
    @given(EDITS)
    def survive(edits: list[tuple[float, int, bytes]]) -> None:
        damaged.write_bytes(attack(content, edits))
        shutil.rmtree(path.parent / ".index", ignore_errors=True)
        try:
            layout = read(str(path))
        except DataError as error:
            assert error.path in (path, damaged)
            return
        filled = layout.lengths > 0
        offsets, ends = layout.offsets[filled], (layout.offsets + layout.lengths * layout.width)[filled]
        assert (layout.lengths >= 0).all() and (offsets >= 0).all() and (ends <= path.stat().st_size).all()
        try:
            batch = rows(next(loader(config, plan(60))))
        except DataError as error:
            assert "web" in str(error)
            return
        assert len(batch) == 60 and all(0 <= token < 1000 for row in batch for token in row)

    survive()
