"""Files with random damage: an error that names the file, or tokens, but no crash, no hang and no other exception."""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import first_quick
from unit.data.token_files import (
    loader,
    plan,
    random_documents,
    rows,
    write_documents,
    write_flat,
    write_megatron,
)

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.storage.token_format import load_format
from pretraining.errors import DataError
from pretraining.files import file_checksum
from pretraining.tools.commands import VerifyConfig
from pretraining.tools.prepare.records import UnitRecord, manifest
from pretraining.tools.prepare.token_files import TokenFile
from pretraining.tools.verify import verify

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
    path = tmp_path / {"npy": "x.npy", "bin": "x.bin", "megatron": "x.bin"}.get(kind, "x.arrow")
    damaged = write_kind(path, kind)
    content = damaged.read_bytes()
    read = load_format(FILE_TYPES[kind], DataConfig(sep_token=999)).documents

    @settings(max_examples=60)
    @given(EDITS)
    def survive(edits: list[tuple[float, int, bytes]]) -> None:
        damaged.write_bytes(attack(content, edits))
        try:
            layout = read(str(path))
        except DataError as error:
            assert error.path in (path, damaged)
            return
        filled = layout.lengths > 0
        offsets, ends = layout.offsets[filled], (layout.offsets + layout.lengths * layout.width)[filled]
        assert (layout.lengths >= 0).all() and (offsets >= 0).all() and (ends <= path.stat().st_size).all()

    survive()


@pytest.mark.parametrize("batch_documents", first_quick(40, 1))
def test_a_damaged_file_is_read_or_named_and_verify_finds_it(tmp_path: Path, batch_documents: int) -> None:
    path = tmp_path / "data/web/x.arrow"
    write_documents(path, random_documents(40, largest=30), batch_documents=batch_documents)
    content = path.read_bytes()
    checksum, size = file_checksum(path)
    record = UnitRecord("", files=[TokenFile("x.arrow", 1, 1, size, checksum)])
    (path.parent / MANIFEST_FILE).write_text(manifest({}, None, 1000, "uint16", [record]))
    config = DataConfig(data_path=str(tmp_path / "data"), seq_length=8, sep_token=999, num_workers=0)

    @settings(max_examples=60)
    @given(EDITS)
    def survive(edits: list[tuple[float, int, bytes]]) -> None:
        damaged = attack(content, edits)
        shutil.rmtree(path.parent / ".index", ignore_errors=True)
        path.write_bytes(damaged)
        try:
            batch = rows(next(loader(config, plan(60))))
            assert len(batch) == 60 and all(0 <= token < 1000 for row in batch for token in row)
        except DataError as error:
            assert "web" in str(error)
        with redirect_stdout(StringIO()) as out:
            if damaged == content:
                verify(VerifyConfig(data_path=str(tmp_path / "data")))
                return
            with pytest.raises(DataError, match=r"\d+ faults? in 1 file "):
                verify(VerifyConfig(data_path=str(tmp_path / "data")))
        lines = out.getvalue().splitlines()
        assert all("web/x.arrow" in line for line in lines) and lines

    survive()
