"""Any part of any tensor is read back exactly, in any layout of files; damaged files are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import file_entry, flip_byte
from unit.checkpoint.examples import load, save, tensors

from pretraining.checkpoint import reader, writer
from pretraining.checkpoint.chunks import Chunk
from pretraining.checkpoint.headers import read_headers
from pretraining.checkpoint.reader import load_tensors, open_tensors, read_tensor
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
def test_a_tensor_that_the_checkpoint_does_not_hold_so_is_an_error_unless_the_file_is_damaged(
    tmp_path: Path, name: str, value: torch.Tensor
) -> None:
    folder = save(tmp_path, 5)
    with pytest.raises(CheckpointError) as raised:
        load(folder, {**tensors(0.0), name: value})
    assert raised.value.path == folder and name in str(raised.value)
    assert not isinstance(raised.value, DamagedError)  # another checkpoint would lack it, too
    flip_byte(shards_of(folder)[0], -1)
    with pytest.raises(DamagedError):
        load(folder, {**tensors(0.0), name: value})
