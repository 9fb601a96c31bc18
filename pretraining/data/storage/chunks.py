"""Token files in an object store, read in chunks that a process keeps in memory, or a node in a folder on its disk.

    DocumentReader --read_into(target, offset)--> `StoreFile` --the chunk's number--> `ChunkCache` --> open chunk
                                                                  a missing one: cache folder, else the store

A chunk ends where a block of documents ends, or after 4 MiB. Training reads documents all over an open block, and none
of the block after it for long, so nothing is fetched that is not needed soon. Threads of `FetchAhead` fetch the chunks
of the next steps; a reader that needs a chunk which is being fetched waits for it.

The processes of a node share the cache folder, also those of several runs. A file of `chunks/` in it is a chunk with
its CRC-32; it is named after the object's place and tag, the chunk's range, and appears complete. The least recently
used ones go when the folder is full; other files stay.

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
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
_SUFFIX = ".chunk"
_STALE_SECONDS = 3600.0
_CHECKSUM_BYTES = 4


class Chunk(Protocol):
    """A part of an object, readable by position in the object."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the object."""


class _MemoryChunk:
    def __init__(self, begin: int, content: bytes) -> None:
        self._begin, self._content = begin, memoryview(content)
        self.size = len(content)

    def read_into(self, target: memoryview, offset: int) -> None:
        begin = offset - self._begin
        target[:] = self._content[begin : begin + len(target)]


class _DiskChunk(OpenFile):
    """A file of the cache folder. Its time of change is that of its last use.

    Args:
        begin: first byte of the chunk in the object.
        again: returns another chunk if the file cannot be read any more.
    """

    def __init__(self, path: Path, begin: int, size: int, again: Callable[[], Chunk], *, is_checked: bool) -> None:
        """Open a file; raise a DataError if it is missing, unreadable or, unless it was checked before, damaged."""
        self._begin, self._again, self._touched = begin, again, 0.0
        super().__init__(str(path), size + _CHECKSUM_BYTES)
        if is_checked:
            return
        content = bytearray(size + _CHECKSUM_BYTES)
        super().read_into(memoryview(content), 0)
        if zlib.crc32(memoryview(content)[:size]) != int.from_bytes(content[size:], "little"):
            raise DataError("damaged", path=path)

    def read_into(self, target: memoryview, offset: int) -> None:
        try:
            is_read = os.preadv(self.descriptor, [target], offset - self._begin) == len(target)
        except OSError:
            is_read = False
        if not is_read:
            self._again().read_into(target, offset)

    def touch(self) -> None:
        """Record that the chunk is in use."""
        now = time.monotonic()
        if now - self._touched > TOUCH_SECONDS:
            self._touched = now
            with suppress(OSError):  # another process may have removed it
                os.utime(self.path)


@dataclass(frozen=True)
class Wanted:
    """A chunk to get: its name in the cache, its range in the object, and what reads it from the store."""

    key: str
    begin: int
    end: int
    fetch: Callable[[], bytes]


class ChunkCache:
    """The chunks that this process holds, and those in the node's cache folder. Threads and processes share it.

    Args:
        folder: cache folder of the node; None = chunks stay in memory alone.
        limit_bytes: of the folder, or of the memory of all processes of the node together.
        processes: of the job on this node.

    Attributes:
        fetched_bytes, fetches: from stores, by this process.
    """

    def __init__(self, folder: Path | None, limit_bytes: int, processes: int = 1) -> None:
        self._folder, self._limit = None if folder is None else folder / "chunks", limit_bytes
        in_memory = limit_bytes if folder is None else min(limit_bytes, MEMORY_BESIDE_FOLDER)
        self._memory_bytes, most_files = max(in_memory // processes, 1), share_of_open_files(4)
        # Shares of the memory and of the open files.
        self._held: RecentlyUsed[_MemoryChunk | _DiskChunk] = RecentlyUsed(
            1.0,
            cost=lambda chunk: chunk.size / self._memory_bytes if isinstance(chunk, _MemoryChunk) else 1 / most_files,
        )
        self._lock = threading.Lock()
        self._coming: dict[str, Future[_MemoryChunk | _DiskChunk]] = {}
        self._checked: set[str] = set()
        self._has_warned = False
        self.fetched_bytes = self.fetches = 0

    def get(self, wanted: Wanted) -> Chunk:
        """Return a chunk; fetch it unless this process, another thread or the folder has it."""
        return self._held.get(wanted.key, lambda: self._find(wanted))

    def use(self, key: str) -> bool:
        """Return whether this process has a chunk, and count it as used if so."""
        chunk = self._held.find(key)
        if isinstance(chunk, _DiskChunk):
            chunk.touch()
        return chunk is not None

    def peek(self, key: str) -> Chunk | None:
        """Return a chunk that this process has."""
        return self._held.peek(key)

    def _find(self, wanted: Wanted) -> _MemoryChunk | _DiskChunk:
        with self._lock:
            coming = self._coming.get(wanted.key)
            if coming is None:
                own = self._coming[wanted.key] = Future[_MemoryChunk | _DiskChunk]()
        if coming is not None:
            # A fetch that failed may have been one that nobody waited for.
            return coming.result() if coming.exception() is None else self._find(wanted)
        try:
            own.set_result(self._in_folder(wanted) or self._keep(wanted, wanted.fetch()))
        except BaseException as error:
            own.set_exception(error)
        finally:
            del self._coming[wanted.key]
        return own.result()

    # The folder

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}{_SUFFIX}"

    def _in_folder(self, wanted: Wanted) -> _DiskChunk | None:
        if self._folder is None:
            return None
        try:
            chunk = self._open(wanted, is_checked=wanted.key in self._checked)
        except DataError:  # missing, or damaged
            return None
        self._checked.add(wanted.key)
        return chunk

    def _open(self, wanted: Wanted, *, is_checked: bool) -> _DiskChunk:
        path, size = self._path(wanted.key), wanted.end - wanted.begin
        return _DiskChunk(path, wanted.begin, size, partial(self._replace, wanted), is_checked=is_checked)

    def _replace(self, wanted: Wanted) -> Chunk:
        """Return a chunk whose file has become unreadable."""
        self._held.drop(wanted.key)
        self._checked.discard(wanted.key)
        with suppress(OSError):
            self._path(wanted.key).unlink()
        return self.get(wanted)

    def _keep(self, wanted: Wanted, content: bytes) -> _MemoryChunk | _DiskChunk:
        self.fetches, self.fetched_bytes = self.fetches + 1, self.fetched_bytes + len(content)
        if self._folder is None or len(content) > self._limit * KEPT_SHARE:
            return _MemoryChunk(wanted.begin, content)
        path = self._path(wanted.key)
        temporary = path.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")
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
            self._checked.add(wanted.key)
            return self._open(wanted, is_checked=True)
        except (OSError, DataError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else str(error)
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s: the cache cannot be used (%s); training reads from the store", self._folder, reason)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(OSError):
                    self._limit = max(1, _remove_oldest(self._folder, self._limit)[1])
            return _MemoryChunk(wanted.begin, content)

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
    for path in folder.glob(f"??/*{_SUFFIX}"):
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
        cuts: [chunks + 1] int64, bytes of the file before each chunk, then all.
    """

    def __init__(self, place: StorePath, size: int, tag: int, cuts: np.ndarray, cache: ChunkCache) -> None:
        self._place, self._tag, self._cache = place, tag, cache
        self._cuts = cuts.tolist()
        version = hashlib.blake2b(f"{place.identity}\0{size}\0{tag}".encode(), digest_size=8).hexdigest()
        self._keys = [f"{version}-{begin}-{end}" for begin, end in pairwise(self._cuts)]
        self._opened: list[pyarrow.NativeFile] = []
        self._failures: dict[int, tuple[float, str]] = {}

    def part(self, begin: int, end: int) -> Chunk:
        """Return what reads bytes [begin, end) faster: their chunk, if it is one."""
        number = bisect_right(self._cuts, begin) - 1
        return self._chunk(number) if end <= self._cuts[number + 1] else self

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file; raise a DataError if it cannot be had, or has changed."""
        while len(target):
            number = bisect_right(self._cuts, offset) - 1
            count = min(len(target), self._cuts[number + 1] - offset)
            self._chunk(number).read_into(target[:count], offset)
            target, offset = target[count:], offset + count

    def key(self, begin: int) -> str:
        """Return the key of the chunk that begins at a byte."""
        return self._keys[bisect_right(self._cuts, begin) - 1]

    def fetch(self, begin: int, stop: threading.Event) -> None:
        """Make the chunk ready that begins at a byte; `stop` ends the retries when set."""
        self._chunk(bisect_right(self._cuts, begin) - 1, stop)

    def _chunk(self, number: int, stop: threading.Event | None = None) -> Chunk:
        chunk = self._cache.peek(self._keys[number])
        if chunk is not None:
            return chunk
        begin, end = self._cuts[number], self._cuts[number + 1]
        fetch = partial(self._fetch, begin, end, stop or threading.Event())
        return self._cache.get(Wanted(self._keys[number], begin, end, fetch))

    def _fetch(self, begin: int, end: int, stop: threading.Event) -> bytes:
        """Read from the store. Opening the object again after the read tells the version that was read."""

        def read(store: Store) -> bytes:
            file = self._opened.pop() if self._opened else self._open(store)
            content = store.read_at(self._place.key, file, begin, end - begin)
            self._opened.append(self._open(store))
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


class ChunkCuts:
    """The ends of a dataset's chunks: those of its blocks of documents and of its files, and every 4 MiB.

    Args:
        sizes: [files], bytes.

    Attributes:
        bases: [files + 1] int64, bytes before each file, then all.
        cuts: [chunks + 1] int64, bytes before each chunk, then all.
    """

    def __init__(self, index: Index, sizes: Sequence[int]) -> None:
        self.bases = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        blocks = np.arange(0, len(index.documents), BLOCK_DOCUMENTS)
        files = index.files_of(blocks)
        offsets = np.minimum(index.documents["offset"][blocks].astype(np.int64), np.asarray(sizes)[files])
        borders = np.unique(np.concatenate((self.bases, self.bases[files] + offsets)))
        counts = -(-np.diff(borders) // LARGEST_CHUNK_BYTES)
        steps = _ranges(counts) * LARGEST_CHUNK_BYTES
        self.cuts = np.concatenate((np.repeat(borders[:-1], counts) + steps, borders[-1:]))

    def of_file(self, number: int) -> np.ndarray:
        """Return the bytes of a file before each of its chunks, then all."""
        first, last = self.cuts.searchsorted(self.bases[number : number + 2])
        cuts: np.ndarray = self.cuts[first : last + 1] - self.bases[number]
        return cuts

    def chunks_of(self, files: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> list[int]:
        """Return the first bytes, counted over all files, of the chunks that hold ranges of bytes of files, all [n]."""
        firsts = self.cuts.searchsorted(self.bases[files] + begins, "right") - 1
        counts = self.cuts.searchsorted(self.bases[files] + ends) - firsts
        numbers = np.unique(np.repeat(firsts, counts) + _ranges(counts))
        places: list[int] = self.cuts[numbers].tolist()
        return places

    def locate(self, place: int) -> tuple[int, int]:
        """Return file and byte of a place that is counted over all files."""
        file = int(self.bases.searchsorted(place, "right")) - 1
        return file, place - int(self.bases[file])


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, … up to each count, end to end."""
    ranges: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranges
