"""Any part of a tensor that lies on disk in pieces is read back exactly, and damage is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.checkpoint_files import flip_byte

from pretraining.checkpoint.layout import Box, Piece
from pretraining.checkpoint.sources import TensorFiles, fill
from pretraining.checkpoint.tensor_files import checksum_file, write_tensors
from pretraining.errors import CheckpointError


def write_pieces(folder: Path, tensors: dict[str, torch.Tensor], rows: int) -> list[str]:
    """A file for every so many rows."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for first in range(0, max(map(len, tensors.values())), rows):
        parts = {name: tensor[first : first + rows] for name, tensor in tensors.items()}
        pieces = [
            Piece(name, Box((first, *(0 for _ in part.shape[1:])), tuple(part.shape)), part)
            for name, part in parts.items()
            if len(part)
        ]
        names.append(f"part-{first}.safetensors")
        write_tensors(folder / names[-1], pieces)
    return names


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    return Box(
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
    write_tensors(tmp_path / "a.safetensors", [Piece("s", Box((), ()), torch.tensor(3.5))])
    assert TensorFiles(tmp_path, {"a.safetensors": None}).read("s") == 3.5


def test_a_piece_that_is_missing_or_there_twice_is_an_error(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 4)
    write_tensors(tmp_path / "again.safetensors", [Piece("a", Box((4, 0), (4, 2)), torch.randn(4, 2))])
    with pytest.raises(CheckpointError, match="holds 8 elements of a where it has 16: a piece is missing"):
        TensorFiles(tmp_path, dict.fromkeys(names[1:])).read("a")
    with pytest.raises(CheckpointError, match="holds 24 elements of a where it has 16"):
        TensorFiles(tmp_path, dict.fromkeys([*names, "again.safetensors"])).read("a")


def test_pieces_of_different_types_are_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "1.safetensors", [Piece("a", Box((0,), (2,)), torch.randn(2))])
    write_tensors(tmp_path / "2.safetensors", [Piece("a", Box((2,), (2,)), torch.randn(2).half())])
    with pytest.raises(CheckpointError, match="pieces of a are of different types"):
        TensorFiles(tmp_path, {"1.safetensors": None, "2.safetensors": None})


def test_a_file_is_compared_with_its_checksum_before_it_is_used(tmp_path: Path) -> None:
    names = write_pieces(tmp_path, {"a": torch.randn(8, 2)}, 4)
    entries = {name: checksum_file(tmp_path / name) for name in names}
    flip_byte(tmp_path / names[1])
    source = TensorFiles(tmp_path, entries)
    assert source.read("a", Box((0, 0), (4, 2))).shape == (4, 2)
    with pytest.raises(CheckpointError, match=rf"{names[1]} is damaged: its checksum is \w{{8}} in place of"):
        source.read("a")
    (tmp_path / names[1]).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
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


def test_tensors_are_filled_with_conversion_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    values = torch.randn(8, 2)
    source = TensorFiles(tmp_path, dict.fromkeys(write_pieces(tmp_path, {"a": values.bfloat16()}, 3)))
    target = torch.zeros(8, 2)
    fill({"a": target}, source)
    assert torch.equal(target, values.bfloat16().float())
    with pytest.raises(CheckpointError, match=r"b cannot be loaded: it is not there; its shape is \(1,\)"):
        fill({"b": torch.zeros(1)}, source)
    with pytest.raises(CheckpointError, match=r"a cannot be loaded: it has the shape \(8, 2\), not \(2, 8\)"):
        fill({"a": torch.zeros(2, 8)}, source)
