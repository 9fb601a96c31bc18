"""The record of a file's content, which distinguishes files of equal names and sizes.

    up to 1 MiB  -->  a checksum of all bytes
    larger       -->  a checksum of 32 parts and, if the file is being indexed, of the borders of its documents

This is the only module that decides whether a file is the same. A file is recorded when it is indexed or prepared, and
again when its time of change is not the noted one. Two large files with equal records may still differ if one has other
tokens between the same document borders, and only outside of the parts.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64
from pretraining.files import Location, check_regular
from pretraining.object_store import StorePath

if TYPE_CHECKING:
    from pretraining.data.storage.token_format import DocumentLayout

PARTS = 32
"""Parts of a large file: a change of a tenth of it is missed once in 29 times, an exchange of its documents never."""
PART_BYTES = 4096
_WHOLE_BYTES = 1 << 20
"""Size up to which a file is compared as a whole."""

ReadRange = Callable[[int, int], bytes]
"""(first byte, bytes) -> these bytes of a file, fewer at its end."""


def time_of_change(status: os.stat_result) -> int:
    """Return the time in ns at which content or attributes of a file last changed, which no program can set."""
    return status.st_ctime_ns


@contextmanager
def open_ranges(path: Location) -> Iterator[ReadRange]:
    """Open a file for reading by ranges; an OSError if it is unreadable, a StoreError if its store fails."""
    if isinstance(path, StorePath):
        with path.open_ranges()[0] as file:
            size = file.size()
            yield lambda begin, count: path.read(file, begin, max(0, min(count, size - begin)))
        return
    check_regular(path)
    with path.open("rb") as file:
        yield lambda begin, size: os.pread(file.fileno(), size, begin)


def content_record(path: Location, begin: int, end: int, layout: DocumentLayout | None = None) -> int:
    """Return the record of the bytes [begin, end) of a file, below 2**64.

    Args:
        layout: documents of a whole token file.

    Raises:
        OSError: the file is unreadable; a StoreError if its store fails.
    """
    size, borders = end - begin, 0
    parts = [(0, size)] if size <= _WHOLE_BYTES else [(place, PART_BYTES) for place in _keyed_places(size)]
    if layout is not None and size > _WHOLE_BYTES:
        filled = layout.lengths > 0  # the place of an empty document is free
        borders = zlib.crc32(layout.lengths.astype("<i8").data, zlib.crc32(layout.offsets[filled].astype("<i8").data))
    checksum = 0
    with open_ranges(path) as read:
        for place, count in parts:
            checksum = zlib.crc32(read(begin + place, count), checksum)
    return combine(size, checksum, borders)


def digest_of_records(records: Iterable[int]) -> str:
    """Return the record of several files in order, 16 hexadecimal digits."""
    return f"{combine(*records):016x}"


def combine(*numbers: int) -> int:
    """Return a hash of integers below 2**64 in order, below 2**64."""
    content = np.array(numbers, dtype="<u8").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _keyed_places(size: int) -> list[int]:
    """Return the first bytes of the parts of a file: its beginning, its end, and others by a hash of its size."""
    numbers = hash64(derive_key(Purpose.CONTENT, size), np.arange(PARTS - 2)) % np.uint64(size // PART_BYTES)
    return sorted({0, size - PART_BYTES, *(numbers.astype(np.int64) * PART_BYTES).tolist()})
