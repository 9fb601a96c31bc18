"""Any part of a tensor that lies on disk in pieces is read back exactly, and damage is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import flip_byte

from pretraining.checkpoint.reader import TensorFiles, checksum_file, load_tensors
from pretraining.checkpoint.writer import Chunk, WriteItem, write_chunks
from pretraining.errors import CheckpointError


def write_pieces(folder: Path, tensors: dict[str, torch.Tensor], rows: int) -> list[str]:
    """A file for every so many rows."""
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


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Chunk:
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    return Chunk(
        tuple(begins), tuple(draw(st.integers(1, size - begin)) for size, begin in zip(shape, begins, strict=True))
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_any_part_is_read_from_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    tensors = {"a": torch.randn(7, 5, 3), "b": torch.randn(9).bfloat16()}
    source = TensorFiles(folder, dict.fromkeys(write_pieces(folder, tensors, rows)))
    assert source.shapes() == {"a": (7, 5, 3), "b": (9,)} and source.dtype("b") == torch.bfloat16
    for name, tensor in tensors.items():
        assert torch.equal(source.read(name), tensor)
        box = data.draw(boxes(tuple(tensor.shape)))
        expected = tensor
        for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            expected = expected.narrow(dim, begin, size)
        assert torch.equal(source.read(name, box), expected)


def test_a_scalar_is_read(tmp_path: Path) -> None:
    write_chunks(tmp_path / "a.safetensors", [WriteItem("s", Chunk((), ()), torch.tensor(3.5))])
    assert TensorFiles(tmp_path, {"a.safetensors": None}).read("s") == 3.5


def test_a_piece_that_is_missing_or_there_twice_is_an_error(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 4)
    write_chunks(tmp_path / "again.safetensors", [WriteItem("a", Chunk((4, 0), (4, 2)), torch.randn(4, 2))])
    with pytest.raises(CheckpointError, match="holds 8 elements of a where it has 16: a piece is missing"):
        TensorFiles(tmp_path, dict.fromkeys(names[1:])).read("a")
    with pytest.raises(CheckpointError, match="holds 24 elements of a where it has 16"):
        TensorFiles(tmp_path, dict.fromkeys([*names, "again.safetensors"])).read("a")


def test_pieces_of_different_types_are_refused(tmp_path: Path) -> None:
    write_chunks(tmp_path / "1.safetensors", [WriteItem("a", Chunk((0,), (2,)), torch.randn(2))])
    write_chunks(tmp_path / "2.safetensors", [WriteItem("a", Chunk((2,), (2,)), torch.randn(2).half())])
    with pytest.raises(CheckpointError, match="pieces of a are of different types"):
        TensorFiles(tmp_path, {"1.safetensors": None, "2.safetensors": None})


def test_a_file_is_compared_with_its_checksum_before_it_is_used(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 4)
    entries = {name: checksum_file(tmp_path / name) for name in names}
    flip_byte(tmp_path / names[1])
    source = TensorFiles(tmp_path, entries)
    assert source.read("a", Chunk((0, 0), (4, 2))).shape == (4, 2)
    with pytest.raises(CheckpointError, match=rf"{names[1]} is damaged: its checksum is \w{{8}} in place of"):
        source.read("a")
    (tmp_path / names[1]).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        TensorFiles(tmp_path, dict.fromkeys(names))
    with pytest.raises(CheckpointError, match=rf"{names[1]} has 0 bytes in place of"):
        TensorFiles(tmp_path, entries)
    longer = dict(entries)
    (tmp_path / names[0]).write_bytes((tmp_path / names[0]).read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"bytes in place of"):
        TensorFiles(tmp_path, {names[0]: longer[names[0]]}).read("a")


def test_a_file_that_is_gone_is_an_error_when_it_is_opened_and_when_it_is_read(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 8)
    source = TensorFiles(tmp_path, dict.fromkeys(names))
    (tmp_path / names[0]).unlink()
    for use in (lambda: TensorFiles(tmp_path, dict.fromkeys(names)), lambda: source.read("a")):
        with pytest.raises(CheckpointError, match=re.escape(f"{names[0]} cannot be read: No such file")):
            use()


def test_tensors_are_converted_where_that_is_asked_for_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    values = torch.randn(8, 2)
    files = dict.fromkeys(write_pieces(tmp_path, {"a": values.bfloat16()}, 3))
    target = torch.zeros(8, 2)
    load_tensors(tmp_path, files, {"a": target}, converts=True)
    assert torch.equal(target, values.bfloat16().float())
    with pytest.raises(CheckpointError, match=r"of b it holds nothing, and 1 x torch\.float32 in 1 dims are needed"):
        load_tensors(tmp_path, files, {"b": torch.zeros(1)}, converts=True)
    with pytest.raises(CheckpointError, match=r"a cannot be loaded: it has the shape \(8, 2\), not \(2, 8\)"):
        load_tensors(tmp_path, files, {"a": torch.zeros(2, 8)}, converts=True)
