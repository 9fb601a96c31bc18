"""Token files in an object store, read in chunks that a process keeps in memory, or a node in a folder on its disk.

    DocumentReader --read_into(target, offset)--> `StoreFile` --the chunk's number--> `ChunkCache` --> open chunk
                                                                  a missing one: cache folder, else the store

A chunk ends where a block of documents ends, or after 4 MiB. Training reads documents all over an open block, and none
of the block after it for long, so nothing is fetched that is not needed soon. Threads of `FetchAhead` fetch the chunks
of the next steps; a reader that needs a chunk which is being fetched waits for it.

The processes of a node share the cache folder, also those of several runs. A file in it is a chunk with its CRC-32; it
is named after the object's place and tag, the chunk's range, and appears complete. The least recently used files go
when the folder is full.

After each read from the store, the object must still have the tag that it had when it was listed. So bytes of another
version are never used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow

from pretraining.data.storage.index import BLOCK_DOCUMENTS, Index
from pretraining.data.storage.open_files import OpenFile, share_of_open_files
from pretraining.data.threads import RecentlyUsed
from pretraining.errors import DataError
from pretraining.files import reason_of
from pretraining.object_store import Store, StoreError, StorePath

log = logging.getLogger(__name__)

LARGEST_CHUNK_BYTES = 2**22
TRIES = 9
"""Tries of a fetch, within about two minutes of pauses."""
FAILED_SECONDS = 300.0
"""Time for which a chunk that could not be had is not asked for again."""
TOUCH_SECONDS = 60.0
"""A chunk in use counts as used again after this time."""
KEPT_SHARE = 0.9
"""Share of its limit that a full cache folder keeps."""
MEMORY_BESIDE_FOLDER = 2**30
"""Bytes of chunks that a node keeps in memory if the cache folder cannot be written."""
_STALE_SECONDS = 3600.0
_CHECKSUM_BYTES = 4


class Chunk(Protocol):
    """A part of an object, readable by position in it."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the chunk."""


@dataclass(frozen=True)
class _MemoryChunk:
    content: bytes

    def read_into(self, target: memoryview, offset: int) -> None:
        target[:] = memoryview(self.content)[offset : offset + len(target)]


class _DiskChunk:
    """A file of the cache folder. Its time of change is that of its last use."""

    def __init__(self, path: Path, size: int, *, is_checked: bool) -> None:
        """Open a file; raise a DataError if it is missing, unreadable or, unless it was checked before, damaged."""
        self._path, self._file, self._touched = path, OpenFile(str(path), size + _CHECKSUM_BYTES), 0.0
        if is_checked:
            return
        content = bytearray(size + _CHECKSUM_BYTES)
        self._file.read_into(memoryview(content), 0)
        if zlib.crc32(memoryview(content)[:size]) != int.from_bytes(content[size:], "little"):
            raise DataError("damaged", path=path)

    def read_into(self, target: memoryview, offset: int) -> None:
        if time.monotonic() - self._touched > TOUCH_SECONDS:
            self._touched = time.monotonic()
            with suppress(OSError):  # another process may have removed it
                os.utime(self._path)
        self._file.read_into(target, offset)


class ChunkCache:
    """The chunks that this process holds, and those in the node's cache folder. Threads and processes share it.

    Args:
        folder: cache folder of the node; None = chunks stay in memory alone.
        limit_bytes: of the folder, or of the memory of all processes of the node together.
        processes: of the job on this node.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, processes: int = 1) -> None:
        self._folder, self._limit = folder, limit_bytes
        in_memory = limit_bytes if folder is None else min(limit_bytes, MEMORY_BESIDE_FOLDER)
        self._memory_bytes, most_files = max(in_memory // processes, 1), share_of_open_files(4)
        # Shares of the memory and of the open files.
        self._held: RecentlyUsed[Chunk] = RecentlyUsed(
            1.0,
            cost=lambda chunk: (
                len(chunk.content) / self._memory_bytes if isinstance(chunk, _MemoryChunk) else 1 / most_files
            ),
        )
        self._lock = threading.Lock()
        self._coming: dict[str, Future[Chunk]] = {}
        self._checked: set[str] = set()
        self._has_warned = False
        self.fetched_bytes = self.fetches = 0

    def get(self, key: str, size: int, fetch: Callable[[], bytes]) -> Chunk:
        """Return a chunk; fetch it unless this process, another thread or the folder has it."""
        return self._held.get(key, lambda: self._find(key, size, fetch))

    def replace(self, key: str, size: int, fetch: Callable[[], bytes]) -> Chunk:
        """Return a chunk whose file in the folder has become unreadable."""
        self._held.drop(key)
        self._checked.discard(key)
        if self._folder is not None:
            with suppress(OSError):
                self._path(key).unlink()
        return self.get(key, size, fetch)

    def _find(self, key: str, size: int, fetch: Callable[[], bytes]) -> Chunk:
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                own = self._coming[key] = Future[Chunk]()
        if coming is not None:
            # A fetch that failed may have been one that nobody waited for.
            return coming.result() if coming.exception() is None else self._find(key, size, fetch)
        try:
            own.set_result(self._in_folder(key, size) or self._keep(key, fetch()))
        except BaseException as error:
            own.set_exception(error)
        finally:
            del self._coming[key]
        return own.result()

    # The folder

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / key

    def _in_folder(self, key: str, size: int) -> Chunk | None:
        if self._folder is None:
            return None
        try:
            chunk = _DiskChunk(self._path(key), size, is_checked=key in self._checked)
        except DataError:  # missing, or damaged
            return None
        self._checked.add(key)
        return chunk

    def _keep(self, key: str, content: bytes) -> Chunk:
        self.fetches, self.fetched_bytes = self.fetches + 1, self.fetched_bytes + len(content)
        if self._folder is None or len(content) > self._limit * KEPT_SHARE:
            return _MemoryChunk(content)
        path = self._path(key)
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(self._folder, len(content) + _CHECKSUM_BYTES)
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.write(zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._checked.add(key)
            return _DiskChunk(path, len(content), is_checked=True)
        except (OSError, DataError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s: the cache cannot be used (%s); training reads from the store", self._folder, reason)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(OSError):
                    self._limit = max(1, _remove_oldest(self._folder, self._limit)[1])
            return _MemoryChunk(content)

    def _make_room(self, folder: Path, size: int) -> None:
        """Count a new file, and remove the least recently used ones if the folder is too full."""
        with (folder / ".bytes").open("a+b") as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)
            counter.seek(0)
            text = counter.read()
            total = int(text) + size if text.isdigit() else self._limit + 1
            if total > self._limit:
                total = _remove_oldest(folder, int(KEPT_SHARE * self._limit) - size)[0] + size
            counter.truncate(0)
            counter.write(str(total).encode())


def _remove_oldest(folder: Path, most_bytes: int) -> tuple[int, int]:
    """Remove the least recently used files of a cache folder; return the bytes that are left, and those before."""
    found, now = [], time.time()
    for path in folder.glob("??/*"):
        with suppress(FileNotFoundError):  # removed by another process
            status = path.stat()
            is_unfinished = path.name.startswith(".")  # left by a killed process if it is old
            if not is_unfinished or now - status.st_mtime > _STALE_SECONDS:
                found.append((0.0 if is_unfinished else status.st_mtime, status.st_size, path))
    left = total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if left <= most_bytes:
            break
        path.unlink(missing_ok=True)
        left -= size
    return left, total


class StoreFile:
    """A token file in a store, with the interface of `OpenFile`.

    Args:
        tag: of the listed version.
        cuts: [chunks + 1] int64, bytes before each chunk, then all (`chunk_cuts`).
    """

    def __init__(self, place: StorePath, size: int, tag: int, cuts: np.ndarray, cache: ChunkCache) -> None:
        self._place, self._tag, self._cache = place, tag, cache
        self._cuts: list[int] = cuts.tolist()
        self._sorted_cuts = cuts
        version = hashlib.blake2b(f"{place.identity}\0{size}\0{tag}".encode(), digest_size=8)
        self._version = version.hexdigest()
        self._last: tuple[int, int, Chunk] = (0, -1, _MemoryChunk(b""))
        self._opened: pyarrow.NativeFile | None = None
        self._failures: dict[int, tuple[float, str]] = {}

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file; raise a DataError if it cannot be had, or has changed."""
        begin, end, chunk = self._last
        if begin <= offset and offset + len(target) <= end:
            self._read(chunk, target, begin, offset)
            return
        while len(target):
            number = int(self._sorted_cuts.searchsorted(offset, "right")) - 1
            begin, end = self._cuts[number], self._cuts[number + 1]
            chunk, count = self._chunk(number), min(len(target), end - offset)
            self._last = (begin, end, chunk)
            self._read(chunk, target[:count], begin, offset)
            target, offset = target[count:], offset + count

    def _read(self, chunk: Chunk, target: memoryview, begin: int, offset: int) -> None:
        try:
            chunk.read_into(target, offset - begin)
        except DataError:  # of the disk with the cache
            self._last = (0, -1, _MemoryChunk(b""))
            number = int(self._sorted_cuts.searchsorted(offset, "right")) - 1
            self._chunk(number, is_lost=True).read_into(target, offset - begin)

    def chunks(self, begins: np.ndarray, ends: np.ndarray) -> list[int]:
        """Return the numbers of the chunks that hold some ranges of bytes, both [n]."""
        firsts = self._sorted_cuts.searchsorted(begins, "right") - 1
        lasts = self._sorted_cuts.searchsorted(ends, "left")
        return sorted(
            {
                number
                for first, last in set(zip(firsts.tolist(), lasts.tolist(), strict=True))
                for number in range(first, last)
            }
        )

    def fetch(self, number: int, stop: threading.Event) -> None:
        """Make a chunk ready; `stop` ends the retries when set."""
        self._chunk(number, stop)

    def _chunk(self, number: int, stop: threading.Event | None = None, *, is_lost: bool = False) -> Chunk:
        begin, end = self._cuts[number], self._cuts[number + 1]
        get = self._cache.replace if is_lost else self._cache.get
        return get(
            f"{self._version}-{begin}-{end}", end - begin, lambda: self._fetch(begin, end, stop or threading.Event())
        )

    def _fetch(self, begin: int, end: int, stop: threading.Event) -> bytes:
        """Read from the store. Opening the object again after the read tells the version that was read."""

        def read(store: Store) -> bytes:
            opened, self._opened = self._opened, None  # after an error, the next try looks at the tag first
            file = self._open(store) if opened is None else opened
            content = store.read_at(self._place.key, file, begin, end - begin)
            self._opened = self._open(store)
            return content

        failed_at, problem = self._failures.get(begin, (-FAILED_SECONDS, ""))
        if time.monotonic() - failed_at < FAILED_SECONDS:  # each sample in the chunk would wait as long
            raise DataError(problem)
        try:
            return self._place.ask(read, stop, TRIES)
        except StoreError as error:
            if not stop.is_set():
                self._failures[begin] = time.monotonic(), str(error)
            raise DataError(str(error)) from error

    def _open(self, store: Store) -> pyarrow.NativeFile:
        opened = store.open(self._place.key)
        if opened is None or opened[1] != self._tag:
            what = "is gone" if opened is None else "is another version"
            problem = f"{what} since the job listed it: start again, so that it is looked at"
            raise DataError(problem, path=self._place)
        return opened[0]


def chunk_cuts(index: Index, number: int, size: int) -> np.ndarray:
    """Return the bytes before each chunk of a file, then all, [chunks + 1] int64."""
    first, last = index.first_documents[number : number + 2].tolist()
    blocks = np.arange(first - first % BLOCK_DOCUMENTS + BLOCK_DOCUMENTS, last, BLOCK_DOCUMENTS)
    borders = index.documents["offset"][blocks].astype(np.int64)
    borders = np.unique(np.concatenate(([0], borders[borders < size], [size])))
    parts = [np.arange(begin, end, LARGEST_CHUNK_BYTES) for begin, end in pairwise(borders.tolist())]
    return np.concatenate([*parts, borders[-1:]])
