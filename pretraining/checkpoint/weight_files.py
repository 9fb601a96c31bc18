"""Weights as Hugging Face keeps them: safetensors files of a bounded size, and an index that says what is where.

names in the model's order -> `plan_files`: filled one after the other -> `write_weights`: a tensor at a time
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pretraining.checkpoint.state import FileEntry, crc32_text
from pretraining.checkpoint.torch_files import Kinds

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def plan_files(kinds: Kinds, max_bytes: int) -> dict[str, Kinds]:
    """What goes into which file, by name; a tensor larger than a file may be has one of its own."""
    files: list[dict[str, Any]] = [{}]
    used = 0
    for name, kind in kinds.items():
        size = bytes_of(*kind)
        if files[-1] and used + size > max_bytes:
            files.append({})
            used = 0
        files[-1][name] = kind
        used += size
    if len(files) == 1:
        return {WEIGHTS_FILE: files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": content for number, content in enumerate(files, start=1)
    }


def index_document(files: dict[str, Kinds]) -> dict[str, Any]:
    """The index of several files."""
    kinds = [kind for content in files.values() for kind in content.values()]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(shape) for _, shape in kinds),
            "total_size": sum(bytes_of(*kind) for kind in kinds),
        },
        "weight_map": {name: file for file, content in files.items() for name in content},
    }


def write_weights(path: Path, kinds: Kinds, values: Iterable[torch.Tensor]) -> FileEntry:
    """Write a file, flushed to disk.

    Args:
        path: of the file.
        kinds: type and shape of its tensors.
        values: the tensors in the same order, on the CPU; one is held at a time.

    Raises:
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + bytes_of(dtype, shape)
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    start = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        size, checksum = file.write(start), zlib.crc32(start)
        for (dtype, shape), value in zip(kinds.values(), values, strict=True):
            assert value.dtype == dtype and tuple(value.shape) == tuple(shape)
            content = value.contiguous().view(-1).view(torch.uint8).numpy().data
            size, checksum = size + file.write(content), zlib.crc32(content, checksum)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, crc32_text(checksum))


def bytes_of(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Size of a tensor."""
    return math.prod(shape) * dtype.itemsize
