"""Files of torch.save, written one tensor at a time and read without executing anything.

torch.save wants all tensors of a file in memory at once. Here it writes the file with room for their bytes, and one
tensor after the other then goes to its place, with its checksum, as a zip file has one of each member. What is written
is what torch.save would have written. Reading maps a file into memory.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from pretraining.checkpoint.sources import check_content
from pretraining.checkpoint.state import FileEntry
from pretraining.errors import CheckpointError

Kinds = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors by name."""


def write_file(
    path: Path, kinds: Kinds, arrange: Callable[[Mapping[str, torch.Tensor]], Any], values: Iterator[torch.Tensor]
) -> None:
    """Write a file, flushed to disk.

    Args:
        path: of the file.
        kinds: of the tensors in it; each has memory of its own.
        arrange: makes the file's content from the tensors by name, which it meets in the order of `kinds`.
        values: the tensors, in that order; one is held at a time.

    Raises:
        OSError: it cannot be written.
    """
    needed = sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds.values())
    if shutil.disk_usage(path.parent).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with FakeTensorMode():
        blanks = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    try:
        with skip_data(materialize_fake_tensors=True):
            torch.save(arrange(blanks), path)
    except RuntimeError as error:  # its writer's name for any error of the file system
        raise OSError(errno.EIO, str(error).splitlines()[0], str(path)) from None
    places = _places(path)
    assert len(places) == len(kinds), "a tensor has a storage of its own, in the order of their names"
    with path.open("r+b") as file:
        for (dtype, shape), place in zip(kinds.values(), places, strict=True):
            value = next(values).cpu().contiguous()
            assert value.dtype == dtype and tuple(value.shape) == shape
            _fill_place(file, place, value.view(-1).view(torch.uint8).numpy().data)
            del value
        file.flush()
        os.fsync(file.fileno())


def load_file(path: Path, entry: FileEntry | None = None) -> dict[str, Any]:
    """Read a file of torch.save, tensors mapped into memory, without executing anything.

    Args:
        path: of the file.
        entry: size and checksum, compared first.

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds anything but tensors and plain values.
    """
    try:
        if entry is not None:
            check_content(path, entry)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch.load raises many kinds, and long texts about how to load it unsafely
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged, or holds more than tensors and plain values: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no dictionary")
    return content


@dataclass(frozen=True)
class _Place:
    """Where a storage lies in a file of torch.save.

    Attributes:
        begin, size: of its bytes.
        entry: of the zip's directory, which holds a checksum of them.
    """

    begin: int
    size: int
    entry: int


def _fill_place(file: BinaryIO, place: _Place, content: memoryview) -> None:
    """Write the bytes of a storage, and their checksum to both places where a zip file has it."""
    assert len(content) == place.size
    checksum = struct.pack("<I", zlib.crc32(content))
    file.seek(place.begin)
    file.write(content)
    file.seek(place.begin + place.size)
    if file.read(4) == b"PK\x07\x08":
        file.seek(place.begin + place.size + 4)
        file.write(checksum)
    file.seek(place.entry + 16)
    file.write(checksum)


def _places(path: Path) -> list[_Place]:
    """Where the storages of a file are, in the order in which torch.save met them."""
    places: dict[int, _Place] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        entry = archive.start_dir
        for info in archive.infolist():  # in the order of the directory
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data"):
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                begin = info.header_offset + 30 + name_length + extra_length
                places[int(number)] = _Place(begin, info.file_size, entry)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))
    return [place for _, place in sorted(places.items())]
