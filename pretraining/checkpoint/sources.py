"""Whole tensors on disk, of which any part can be read without other processes.

    pieces in safetensors files  ->  `TensorFiles`  ->  a tensor, or a box of it, in memory

What an export needs of a checkpoint, and what every rank needs of weights that come from elsewhere: `fill` reads this
rank's part of each tensor, whatever the mesh. No more than one tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from pretraining.checkpoint.layout import Box, local_box, local_tensor
from pretraining.checkpoint.state import FileEntry
from pretraining.checkpoint.tensor_files import StoredPiece, checksum_file, read_header, read_piece
from pretraining.errors import CheckpointError


class TensorSource(Protocol):
    """Tensors by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's elements."""
        ...

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A part of a tensor, by default all of it, on the CPU.

        Raises:
            CheckpointError: it cannot be read, or is damaged.
        """
        ...


class TensorFiles:
    """Tensors in the safetensors files of a folder, whole or in pieces.

    Args:
        folder: of the files.
        files: their names, and where they are known, size and checksum: a file is then read wholly and compared with
            them before the first piece is taken from it.

    Raises:
        CheckpointError: a file cannot be read, or pieces of one name are not of one tensor.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileEntry | None]) -> None:
        self._folder = folder
        self._unchecked = {name: entry for name, entry in files.items() if entry is not None}
        self._pieces: dict[str, list[StoredPiece]] = {}
        for name in files:
            for piece in header_of(folder / name):
                self._pieces.setdefault(piece.name, []).append(piece)
        for name, pieces in self._pieces.items():
            kinds = {(piece.dtype, len(piece.box.sizes)) for piece in pieces}
            if len(kinds) > 1:
                raise CheckpointError(f"{folder}: pieces of {name} are of different types")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor: as far as its pieces reach."""
        return {name: extent(piece.box for piece in pieces) for name, pieces in self._pieces.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's elements."""
        return self._pieces[name][0].dtype

    def files_of(self, name: str) -> list[str]:
        """The files that hold pieces of a tensor."""
        return [piece.file for piece in self._pieces[name]]

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A part of a tensor, by default all of it.

        Raises:
            CheckpointError: a file cannot be read or is not what was written, or an element is in none of them, or in
                two.
        """
        pieces = self._pieces[name]
        shape = extent(piece.box for piece in pieces)
        box = Box((0,) * len(shape), shape) if box is None else box
        values = torch.empty(box.sizes, dtype=pieces[0].dtype)
        found = 0
        for piece in pieces:
            part = box.overlap(piece.box)
            if part is not None:
                self._read(piece, part, inside(values, box, part))
                found += part.count
        if found != box.count:
            raise CheckpointError(
                f"{self._folder} holds {found:,} elements of {name} where it has {box.count:,}: a piece is missing, or "
                "there twice"
            )
        return values

    def _read(self, piece: StoredPiece, part: Box, target: torch.Tensor) -> None:
        path = self._folder / piece.file
        entry = self._unchecked.pop(piece.file, None)
        try:
            if entry is not None:
                check_content(path, entry)
            with path.open("rb", buffering=0) as file:
                read_piece(file.fileno(), piece, part, target)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def fill(tensors: Mapping[str, torch.Tensor], source: TensorSource) -> None:
    """Read this rank's part of every tensor into its place; types are converted.

    Raises:
        CheckpointError: the source lacks a tensor or has it in another shape, or it cannot be read.
    """
    shapes = source.shapes()
    for name, tensor in tensors.items():
        if shapes.get(name) != tuple(tensor.shape):
            held = f"it has the shape {shapes[name]}, not" if name in shapes else "it is not there; its shape is"
            raise CheckpointError(f"{name} cannot be loaded: {held} {tuple(tensor.shape)}")
        box = local_box(tensor)
        if box.count > 0:
            local_tensor(tensor).copy_(source.read(name, box))


def header_of(path: Path) -> list[StoredPiece]:
    """What a file holds; `read_header` with the file system's errors as ones for users."""
    try:
        return read_header(path).pieces
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def check_content(path: Path, entry: FileEntry) -> None:
    """Compare a file with what was written.

    Raises:
        CheckpointError: it is another one.
        OSError: it cannot be read.
    """
    fault = content_fault(path, checksum_file(path), entry)
    if fault is not None:
        raise CheckpointError(fault)


def content_fault(path: Path, found: FileEntry, written: FileEntry) -> str | None:
    """In what a file is not what was written, if it is not."""
    if found.bytes != written.bytes:
        return f"{path} has {found.bytes:,} bytes in place of {written.bytes:,}"
    if found.crc32 != written.crc32:
        return f"{path} is damaged: its checksum is {found.crc32} in place of {written.crc32}"
    return None


def extent(boxes: Iterable[Box]) -> tuple[int, ...]:
    """The smallest shape that all boxes are inside of."""
    ends = [[begin + size for begin, size in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
    return tuple(max(column) for column in zip(*ends, strict=True))


def inside(values: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Where a part lies in the values of the box around it; the same memory."""
    for dim, (begin, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        values = values.narrow(dim, begin - box.offsets[dim], size)
    return values
