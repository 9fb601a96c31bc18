"""Any part of any tensor is read back exactly, in any layout of files; damaged files are named."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from unit.checkpoint.checkpoint_files import file_entry, flip_byte
from unit.checkpoint.examples import load, save, tensors

from pretraining.checkpoint import reader, writer
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.headers import read_header, read_headers
from pretraining.checkpoint.reader import ReadItem, load_tensors, open_tensors, read_chunk, read_tensor
from pretraining.checkpoint.writer import WriteItem, write_chunks
from pretraining.distributed import processes
from pretraining.errors import CheckpointError, DamagedError

pytestmark = pytest.mark.usefixtures("single_process")


def write_pieces(folder: Path, tensors: dict[str, torch.Tensor], rows: int) -> list[str]:
    """Write one file per group of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for first in range(0, max(map(len, tensors.values())), rows):
        parts = {name: tensor[first : first + rows] for name, tensor in tensors.items()}
        pieces = [
            WriteItem(name, Chunk((first, *(0 for _ in part.shape[1:])), tuple(part.shape)), part)
            for name, part in parts.items()
            if len(part)
        ]
        names.append(f"part-{first}.safetensors")
        write_chunks(folder / names[-1], pieces)
    return names


@given(st.integers(1, 9))
def test_a_tensor_is_read_from_any_pieces(tmp_path_factory: pytest.TempPathFactory, rows: int) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    tensors = {"a": torch.randn(7, 5, 3), "b": torch.randn(9).bfloat16()}
    source = read_headers(folder, write_pieces(folder, tensors, rows))
    assert source.shape("a") == (7, 5, 3) and read_tensor(source, "b").dtype == torch.bfloat16
    assert all(torch.equal(read_tensor(source, name), tensor) for name, tensor in tensors.items())


def test_cut_or_converted_values_go_through_a_small_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BUFFER_BYTES", 100)
    values = {"a": torch.randn(37, 6), "long rows": torch.randn(3, 60), "b": torch.randn(50)}
    files = dict.fromkeys(write_pieces(tmp_path, values, 20))
    targets = {name: torch.zeros(each.shape, dtype=torch.bfloat16) for name, each in values.items()}
    load_tensors(tmp_path, files, targets)
    assert all(torch.equal(targets[name], each.bfloat16()) for name, each in values.items())


def test_a_piece_that_is_missing_or_there_twice_or_of_another_type_is_an_error(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 4)
    write_chunks(tmp_path / "again.safetensors", [WriteItem("a", Chunk((4, 0), (4, 2)), torch.randn(4, 2))])
    write_chunks(tmp_path / "half.safetensors", [WriteItem("a", Chunk((8, 0), (1, 2)), torch.randn(1, 2).half())])
    for files in (names[1:], [*names, "again.safetensors"], [*names, "half.safetensors"]):
        with pytest.raises(CheckpointError) as refused:
            read_tensor(read_headers(tmp_path, files), "a")
        assert refused.value.path == tmp_path


def test_files_are_compared_with_their_checksums_before_a_tensor_is_read(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in write_pieces(tmp_path, {"a": torch.randn(8)}, 4))
    entries = {path.name: file_entry(path) for path in (first, second)}
    flip_byte(second)
    with pytest.raises(DamagedError, match=f"^{second} "):
        open_tensors(tmp_path, entries)
    second.write_bytes(b"")
    for known in (entries, dict.fromkeys(entries)):
        with pytest.raises(DamagedError, match=f"^{second}"):
            open_tensors(tmp_path, known)
    second.unlink()
    with pytest.raises(DamagedError) as gone:
        open_tensors(tmp_path, dict.fromkeys(entries))
    assert gone.value.path == second


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of two files: the head, and all other tensors."""
    monkeypatch.setattr(
        writer, "file_of_tensor", lambda tensors, _: {name: 1 if name in head() else 2 for name in tensors}
    )
    folder = save(tmp_path, 7)
    assert len(shards_of(folder)) == 2
    return folder


def head() -> dict[str, torch.Tensor]:
    """Return the tensors of the first file."""
    return {"lm_head.weight": torch.zeros(4)}


def layer() -> dict[str, torch.Tensor]:
    """Return a part of the tensors of the second file."""
    return {"model.layers.0.a.weight": torch.zeros(3, 2)}


def test_every_flipped_bit_is_found(two_files: Path) -> None:
    for shard in shards_of(two_files):
        for place in range(0, shard.stat().st_size, 3):
            flip_byte(shard, place, 1 << place % 8)
            with pytest.raises(DamagedError, match=f"^{shard} is damaged: "):
                load(two_files, tensors(0.0))
            flip_byte(shard, place, 1 << place % 8)
    load(two_files, tensors(0.0))


def test_every_damaged_file_is_named_once(two_files: Path) -> None:
    first, second = shards_of(two_files)
    for places in [(-1, -1), (0, -1), (0, 0)]:  # in the tensors, in the header
        for shard, place in zip((first, second), places, strict=True):
            flip_byte(shard, place)
        for wanted in (tensors(0.0), head(), layer()):
            with pytest.raises(DamagedError) as raised:
                load(two_files, wanted)
            assert str(raised.value).count(" is damaged: ") == 2
            assert str(raised.value).count(str(first)) == str(raised.value).count(str(second)) == 1
        for shard, place in zip((first, second), places, strict=True):
            flip_byte(shard, place)


def test_a_fault_that_one_rank_finds_is_an_error(two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = processes.gather_from_every_rank

    def with_another_rank(function: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        (own,) = gather(function)
        others = {name: f"{name} is damaged" for name, fault in dict(own).items() if fault is None}
        return [others, own] if others else [own]

    monkeypatch.setattr(reader, "gather_from_every_rank", with_another_rank)
    with pytest.raises(DamagedError) as raised:
        load(two_files, tensors(0.0))
    assert str(raised.value).count(" is damaged") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("extra.weight", torch.zeros(1)),
        ("lm_head.weight", torch.zeros(5)),
        ("lm_head.weight", torch.zeros(4).bfloat16()),
        ("lm_head.weight", torch.zeros(2, 2)),
    ],
)
def test_another_tensor_than_the_checkpoint_holds_is_no_damage(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    folder = save(tmp_path, 5)
    with pytest.raises(CheckpointError) as raised:
        load(folder, {**tensors(0.0), name: value})
    assert raised.value.path == folder and name in str(raised.value)
    assert not isinstance(raised.value, DamagedError)  # another checkpoint would lack it, too
    flip_byte(shards_of(folder)[0], -1)
    with pytest.raises(DamagedError):
        load(folder, {**tensors(0.0), name: value})


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


def test_a_file_is_safetensors_with_the_checksum_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
