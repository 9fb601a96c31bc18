from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from unit.checkpoint.checkpoint_files import file_entry

from pretraining.checkpoint import writer
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.headers import read_header
from pretraining.checkpoint.reader import ReadItem, read_chunk
from pretraining.checkpoint.writer import WriteItem, write_chunks
from pretraining.errors import CheckpointError, DamagedError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def piece(name: str, values: torch.Tensor, offsets: tuple[int, ...] | None = None) -> WriteItem:
    return WriteItem(name, Chunk(offsets or (0,) * values.dim(), tuple(values.shape)), values)


def example() -> list[WriteItem]:
    return [
        piece("step", torch.tensor(3.0)),
        piece("odd", torch.arange(5, dtype=torch.uint8)),
        piece("wide", torch.arange(12, dtype=torch.float64).reshape(3, 4)),
        piece("rows", torch.randn(4, 3).bfloat16(), offsets=(8, 0)),
        piece("turned", torch.randn(3, 5).T),
    ]


def test_a_file_is_safetensors_and_its_checksum_is_the_one_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CHUNK_BYTES", 20)
    path = tmp_path / "a.safetensors"
    entry = write_chunks(path, example())
    content = path.read_bytes()
    assert entry.bytes == len(content) and entry.crc32 == f"{zlib.crc32(content):08x}"
    assert file_entry(path) == entry
    loaded = load_file(path)
    assert all(
        torch.equal(loaded[each.name], each.values) for each in example() if each.name in ("step", "odd", "wide")
    )
    for stored in read_header(path).chunks:
        assert stored.begin % stored.dtype.itemsize == 0


@pytest.mark.usefixtures("single_process")
def test_torchs_own_reader_reads_the_pieces_of_several_files(tmp_path: Path) -> None:
    whole = torch.randn(10, 3)
    write_chunks(tmp_path / "a.safetensors", [piece("w", whole[:6])])
    write_chunks(tmp_path / "b.safetensors", [piece("w", whole[6:], offsets=(6, 0)), piece("s", torch.tensor(7.0))])
    target = {"w": torch.zeros(10, 3), "s": torch.tensor(0.0)}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)))
    assert torch.equal(target["w"], whole) and target["s"] == 7


@settings(max_examples=60)
@given(st.data())
def test_any_part_of_a_piece_reads_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    offsets = tuple(data.draw(st.integers(0, 9)) for _ in shape)
    values = torch.randint(0, 2, shape).to(dtype)
    path = tmp_path_factory.getbasetemp() / "part.safetensors"
    write_chunks(path, [piece("before", torch.ones(2)), piece("x", values, offsets)])
    stored = next(each for each in read_header(path).chunks if each.name == "x")
    assert (stored.chunk.offsets, stored.chunk.sizes, stored.dtype) == (offsets, shape, dtype)
    begins = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = tuple(data.draw(st.integers(1, size - begin)) for size, begin in zip(shape, begins, strict=True))
    part = Chunk(tuple(offset + begin for offset, begin in zip(offsets, begins, strict=True)), sizes)
    expected = values[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))]
    for target in (
        torch.zeros(sizes, dtype=dtype),
        torch.zeros(sizes[::-1], dtype=dtype).permute(tuple(range(len(sizes)))[::-1]),
    ):
        with path.open("rb") as file:
            read_chunk(file.fileno(), ReadItem(stored, part, target))
        assert torch.equal(target, expected)


def with_header(header: object, rest: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 100,
        (50).to_bytes(8, "little") + b"x" * 50,
        with_header([1, 2]),
        with_header({"x": 3}),
        with_header({"x": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, b"0000"),
        with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, b"0000"),
        (10**5).to_bytes(8, "little") + b"[" * 10**5,
        with_header({"x": {"dtype": "F32", "shape": [1]}}, b"0000"),
        with_header({"__metadata__": {"DCP_SHARDING_INFO": "["}, "x": {}}),
        with_header(
            {
                "__metadata__": {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": [0, 0]}})},
                "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            b"0000",
        ),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_with_the_files_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedError) as refused:
        read_header(path)
    assert refused.value.path == path


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_chunks(path, [piece("x", torch.ones(100))])
    stored = read_header(path).chunks[0]
    os.truncate(path, path.stat().st_size - 4)
    with path.open("rb") as file, pytest.raises(CheckpointError, match="x"):
        read_chunk(file.fileno(), ReadItem(stored, stored.chunk, torch.empty(100)))
