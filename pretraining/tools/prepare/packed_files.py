"""Input files, plain or compressed: a row per compression, known by its first bytes.

InputFile --open_unpacked--> its bytes as they were before compression, and how many were read from disk
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from pretraining.errors import DataError

_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True)
class InputFile:
    """A file of documents.

    Attributes:
        name: path relative to the input, with `/`; the same on every machine.
        size: bytes on disk.
        format: name of a row of `FORMATS`.
        compression: name of a row of `COMPRESSIONS`; None = plain.
    """

    path: Path
    name: str
    size: int
    format: str = "text"
    compression: str | None = None


@dataclass(frozen=True)
class Compression:
    """A compression that is read.

    Attributes:
        starts: first bytes of a compressed file, any of them.
        unpack: returns the unpacked stream of a packed one.
    """

    starts: tuple[bytes, ...]
    unpack: Callable[[BinaryIO], Any]


def _by_arrow(codec: str) -> Callable[[BinaryIO], Any]:
    return lambda raw: pa.CompressedInputStream(pa.PythonFile(raw, "r"), codec)


_SKIPPABLE = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(80, 96))  # pzstd begins with such a frame
_BZIP2 = tuple(b"BZh%d" % level + mark for level in range(1, 10) for mark in (b"1AY&SY", b"\x17rE8P\x90"))
COMPRESSIONS = {
    "gzip": Compression((b"\x1f\x8b",), lambda raw: gzip.GzipFile(fileobj=raw)),
    "zstd": Compression((b"\x28\xb5\x2f\xfd", *_SKIPPABLE), _by_arrow("zstd")),
    "bzip2": Compression(_BZIP2, bz2.BZ2File),
    "xz": Compression((b"\xfd7zXZ\x00", b"\x5d\x00\x00"), lzma.LZMAFile),
    "lz4": Compression((b"\x04\x22\x4d\x18",), _by_arrow("lz4")),
}


def compression_of(head: bytes) -> str | None:
    """Return the name of the compression of a file with these first bytes, if any."""
    return next((name for name, row in COMPRESSIONS.items() if head.startswith(row.starts)), None)


@contextmanager
def open_unpacked(file: InputFile, begin: int = 0) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Yield the unpacked bytes from `begin - 1` on, and a function that counts the bytes read since its last call.

    Raises:
        DataError: the file cannot be read or unpacked, also inside the `with` block.
    """
    try:
        with file.path.open("rb") as raw:
            if begin:
                raw.seek(begin - 1)
            counted = begin

            def bytes_read() -> int:
                nonlocal counted
                before, counted = counted, max(counted, min(raw.tell(), file.size))
                return counted - before

            stream: BinaryIO = raw
            if file.compression is not None:
                stream = io.BufferedReader(COMPRESSIONS[file.compression].unpack(raw), _BLOCK_BYTES)
            yield stream, bytes_read
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = ""
        if file.compression is not None:
            hint = ". It is truncated or damaged: fetch it again. After `zstd --long`, unpack it: zstd -d --long=31"
        raise DataError(f"it cannot be read: {reason}{hint}", path=file.path) from error
