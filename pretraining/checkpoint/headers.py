"""Headers of tensor files: the place of each tensor in a safetensors or torch.save file.

    files of a folder -> `read_header` of each -> `StoredTensors`: the byte at which each chunk of each tensor begins

`reader` reads the values. Reading a file never executes anything in it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZIP_STORED, ZipFile

import torch

from pretraining.checkpoint.chunks import DTYPES, Chunk
from pretraining.checkpoint.manifest import MODEL_FILE, OPTIMIZER_FILE, OPTIMIZER_PREFIX
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import check_regular, lfs_pointer_hint, parse_json, with_retries

T = TypeVar("T")

LARGEST_HEADER_BYTES = 10**8


@dataclass(frozen=True)
class StoredChunk:
    """Chunk of a tensor in a file, and the byte at which it begins."""

    name: str
    dtype: torch.dtype
    chunk: Chunk
    file: str
    begin: int

    @property
    def bytes(self) -> int:
        """Length in the file."""
        return self.chunk.count * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """Content of a file.

    Attributes:
        chunks: chunks in the file; in safetensors, in file order.
        bytes: bytes before the first chunk.
        crc32: checksum of these bytes if only chunks follow; else None.
    """

    chunks: list[StoredChunk]
    bytes: int = 0
    crc32: int | None = None


class StoredTensors:
    """Tensors in the files of a folder, with the place of each chunk.

    Attributes:
        chunks: chunks by tensor; `completeness.tensor_faults` checks that none is missing.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Header]) -> None:
        self.folder, self.headers = folder, headers
        self.chunks: dict[str, list[StoredChunk]] = {}
        for header in headers.values():
            for stored in header.chunks:
                self.chunks.setdefault(stored.name, []).append(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the smallest shape that contains all chunks of a tensor; () without chunks."""
        ends = (stored.chunk.ends for stored in self.chunks.get(name, ()))
        return tuple(map(max, zip(*ends, strict=False)))


def read_headers(folder: Path, files: Iterable[str]) -> StoredTensors:
    """Read the headers of a folder's files, in one process; raises as `read_header`."""
    return StoredTensors(folder, {name: read_header(folder / name) for name in files})


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        DamagedError: the file cannot be read, is damaged or of another form, or its tensors do not fill it exactly.
    """
    return read_with_retries(path, _pt_header if path.suffix == ".pt" else _safetensors_header)


def read_with_retries(path: Path, action: Callable[[Path], T]) -> T:
    """Call an action that reads a file, with retries; raise a DamagedError if the file cannot be read."""

    def read() -> T:
        check_regular(path)
        return action(path)

    try:
        return with_retries(read, f"reading {path}")
    except OSError as error:
        raise DamagedError(f"cannot be read: {error.strerror or error}", path=path) from None


# The two forms


def _safetensors_header(path: Path) -> Header:
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(end - 8, LARGEST_HEADER_BYTES):
            raise DamagedError(lfs_pointer_hint(path) or "no safetensors file", path=path)
        content = file.read(length)
    try:
        chunks = _stored_chunks(path.name, parse_json(content), 8 + length, end)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"its header is invalid ({error})", path=path) from None
    return Header(chunks, 8 + length, zlib.crc32(content, zlib.crc32(prefix)))


def _stored_chunks(file: str, header: dict[str, Any], data_begin: int, file_end: int) -> list[StoredChunk]:
    """Return the chunks of a header in file order; raise any error if the header is invalid."""
    sharding = parse_json((header.pop("__metadata__", None) or {}).get("DCP_SHARDING_INFO", "{}"))
    chunks = []
    for name, entry in header.items():
        dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
        if dtype is None:
            raise ValueError(f"tensor {name} is of type {entry['dtype']}, which is not read")
        begin, end = entry["data_offsets"]
        offsets = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
        numbers = (*shape, *offsets, begin, end)
        if (
            len(offsets) != len(shape)
            or not all(type(number) is int and number >= 0 for number in numbers)
            or end - begin != prod(shape) * dtype.itemsize
        ):
            raise ValueError(f"tensor {name}")
        chunks.append(StoredChunk(name, dtype, Chunk(offsets, shape), file, data_begin + begin))
    chunks.sort(key=lambda stored: (stored.begin, stored.chunk.count))
    at = data_begin
    for stored in chunks:
        if stored.begin != at:
            raise ValueError(f"tensor {stored.name} begins at byte {stored.begin}, not {at}")
        at += stored.bytes
    if at != file_end:
        raise ValueError(f"its tensors end at byte {at} of {file_end}")
    return chunks


def _pt_header(path: Path) -> Header:
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, since its import is slow

    with FakeTensorMode():
        content = load_file(path)
    if path.name not in (MODEL_FILE, OPTIMIZER_FILE):
        return Header([])
    tensors = content if path.name == MODEL_FILE else _flat_optimizer_state(content, path)
    chunks = {name: _stored_chunk(path, name, value) for name, value in tensors.items()}
    # A tied head is the embedding, saved under a second name.
    head, embedding = chunks.get("lm_head.weight"), chunks.get("model.embed_tokens.weight")
    if head is not None and embedding is not None and head.begin == embedding.begin:
        del chunks["lm_head.weight"]
    return Header(list(chunks.values()))


def load_file(path: Path) -> dict[str, Any]:
    """Return the content of a torch.save file without executing anything.

    Raises:
        DamagedError: the file cannot be read, is damaged, or holds more than tensors and plain values.
    """
    try:
        content = read_with_retries(path, _load_stored)
    except CheckpointError:
        raise
    except Exception:  # torch.load raises many types, with long texts about unsafe loading
        raise DamagedError(
            lfs_pointer_hint(path)
            or "damaged, or holds more than tensors and plain values; nothing in it was executed. Use another "
            "checkpoint, or save it again with tensors and plain values only",
            path=path,
        ) from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise DamagedError("holds no dictionary with names", path=path)
    return content


def _load_stored(path: Path) -> Any:
    """Load an uncompressed archive, as torch.save writes it; a compressed one could fill the memory."""
    with ZipFile(path) as archive:
        if any(entry.compress_type != ZIP_STORED for entry in archive.infolist()):
            raise DamagedError("has compressed entries, which torch.save never writes: save it again", path=path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _flat_optimizer_state(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        state = content["state"].items()
        return {f"{OPTIMIZER_PREFIX}{key}.{name}": value for name, kept in state for key, value in kept.items()}
    except (KeyError, AttributeError):
        raise DamagedError("has no optimizer state by parameter names", path=path) from None


def _stored_chunk(path: Path, name: str, value: Any) -> StoredChunk:
    if not isinstance(value, torch.Tensor):
        raise DamagedError(f"{name} is no tensor", path=path)
    begin = value.untyped_storage()._checkpoint_offset if value.layout == torch.strided else None
    if begin is None or not value.is_contiguous():
        raise DamagedError(f"{name} is no tensor with contiguous elements, as torch.save writes them", path=path)
    begin += int(value.storage_offset()) * value.itemsize
    return StoredChunk(name, value.dtype, Chunk.whole(value.shape), path.name, begin)
