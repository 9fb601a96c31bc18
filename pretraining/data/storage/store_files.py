"""Token files in an object store, read in chunks that a process keeps in memory, or a node in a folder on its disk.

    DocumentReader --read_into(target, offset)--> `StoreFile` --the chunk's number--> `ChunkCache` --> open chunk
                                                                  a missing one: cache folder, else the store

A chunk ends where a block of documents ends, or after 4 MiB. Training reads documents all over an open block, and none
of the block after it for long, so nothing is fetched that is not needed soon. Threads of the `Prefetcher` fetch the
chunks of the next steps; a reader that needs a chunk which is being fetched waits for it.

All processes of a node share the cache folder, also processes of several runs. A file in its folder `chunks/` is a
chunk with the CRC-32 of its bytes and its name. The name has the object's place and tag, and the chunk's range. A file
appears complete. When the folder is full, the least recently used chunks are removed; other files stay. Symbolic links
in the folder are not followed.

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
from functools import cache, partial
from itertools import chain, pairwise
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
TOUCH_SECONDS = 10.0
"""A chunk in use counts as used again after this time."""
KEPT_SHARE = 0.9
"""Share of its limit that a full cache folder keeps."""
MEMORY_BESIDE_FOLDER = 2**30
"""Bytes of chunks that a node keeps in memory if the cache folder cannot be written."""
_SUFFIX = ".chunk"
_COUNTER = ".bytes"
"""File with the bytes of all chunks in the folder."""
_STALE_SECONDS = 3600.0
_CHECKSUM_BYTES = 4


class ReadableChunk(Protocol):
    """A part of an object, readable by position in the object."""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the object."""


class _MemoryChunk:
    def __init__(self, begin: int, content: bytes) -> None:
        self._begin, self._content = begin, memoryview(content)
        self.size, self.touched = len(content), 0.0

    def read_into(self, target: memoryview, offset: int) -> None:
        begin = offset - self._begin
        target[:] = self._content[begin : begin + len(target)]


class _DiskChunk(OpenFile):
    """A file of the cache folder. Its time of change is that of its last use.

    Args:
        begin: first byte of the chunk in the object.
        again: returns another chunk if the file cannot be read any more.
    """

    def __init__(
        self, path: Path, begin: int, size: int, again: Callable[[], ReadableChunk], *, is_checked: bool
    ) -> None:
        """Open a file; raise a DataError if it is missing, unreadable or, unless it was checked before, damaged."""
        self._begin, self._again, self.touched = begin, again, 0.0
        super().__init__(str(path), size + _CHECKSUM_BYTES)
        if is_checked:
            return
        content = bytearray(size + _CHECKSUM_BYTES)
        super().read_into(memoryview(content), 0)
        if _checksum(path, memoryview(content)[:size]) != content[size:]:
            raise DataError("damaged, or the file of another chunk", path=path)

    def read_into(self, target: memoryview, offset: int) -> None:
        try:
            is_read = os.preadv(self.descriptor, [target], offset - self._begin) == len(target)
        except OSError:
            is_read = False
        if not is_read:
            self._again().read_into(target, offset)


def _checksum(path: Path, content: bytes | memoryview) -> bytes:
    """Return the checksum of a chunk under the name of its file."""
    return zlib.crc32(path.name.encode(), zlib.crc32(content)).to_bytes(_CHECKSUM_BYTES, "little")


def _refuse_links(*paths: Path) -> None:
    """Raise an OSError if a path is a link: it leads out of the cache folder, which others may write to."""
    for path in paths:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path))


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

    def get(self, file: StoreFile, number: int) -> ReadableChunk:
        """Return a chunk of a file; fetch it unless this process, another thread or the folder has it."""
        return self._held.get(file.keys[number], lambda: self._find(file, number))

    def peek(self, key: str) -> ReadableChunk | None:
        """Return a chunk that this process has."""
        return self._held.peek(key)

    def use(self, key: str, now: float) -> bool:
        """Return whether this process has a chunk, and count it as used at a time (`monotonic`) if so."""
        chunk = self._held.peek(key)
        if chunk is not None and now - chunk.touched > TOUCH_SECONDS:
            chunk.touched = now
            self._held.find(key)
            with suppress(OSError):  # another process may have removed the file
                if isinstance(chunk, _DiskChunk):
                    os.utime(chunk.path)
        return chunk is not None

    def _find(self, file: StoreFile, number: int) -> _MemoryChunk | _DiskChunk:
        key = file.keys[number]
        with self._lock:
            coming = self._coming.get(key)
            if coming is None:
                future = self._coming[key] = Future[_MemoryChunk | _DiskChunk]()
        if coming is not None:
            return coming.result()
        try:
            future.set_result(self._in_folder(file, number) or self._keep(file, number, file.fetch(number)))
        except BaseException as error:
            future.set_exception(error)
        finally:
            del self._coming[key]
        return future.result()

    # The folder

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}{_SUFFIX}"

    def _in_folder(self, file: StoreFile, number: int) -> _DiskChunk | None:
        if self._folder is None:
            return None
        key, (begin, end) = file.keys[number], file.cuts[number : number + 2]
        path, again = self._path(key), partial(self._replace, file, number)
        try:
            _refuse_links(self._folder, path.parent, path)
            chunk = _DiskChunk(path, begin, end - begin, again, is_checked=key in self._checked)
        except (OSError, DataError):  # missing, or damaged
            return None
        self._checked.add(key)
        return chunk

    def _replace(self, file: StoreFile, number: int) -> ReadableChunk:
        """Return a chunk whose file has become unreadable."""
        self._held.drop(file.keys[number])
        self._checked.discard(file.keys[number])
        return self.get(file, number)

    def _keep(self, file: StoreFile, number: int, content: bytes) -> _MemoryChunk | _DiskChunk:
        self.fetches, self.fetched_bytes = self.fetches + 1, self.fetched_bytes + len(content)
        chunk = _MemoryChunk(file.cuts[number], content)
        if self._folder is None or len(content) > self._limit * KEPT_SHARE:
            return chunk
        path = self._path(file.keys[number])
        temporary = path.with_name(f".{secrets.token_hex(8)}{_SUFFIX}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_links(self._folder, path.parent, self._folder / _COUNTER)
            self._make_room(self._folder, len(content) + _CHECKSUM_BYTES)
            try:
                temporary.write_bytes(content + _checksum(path, content))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._checked.add(file.keys[number])
            return self._in_folder(file, number) or chunk
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                reason = reason_of(error)
                log.warning("%s: the cache cannot be used (%s); training reads from the store", self._folder, reason)
            return chunk

    def _make_room(self, folder: Path, size: int) -> None:
        """Count a new file, and remove the least recently used ones if the folder is too full."""
        with (folder / _COUNTER).open("a+b") as counter:
            fcntl.flock(counter, fcntl.LOCK_EX)
            counter.seek(0)
            text = counter.read()
            total = int(text) + size if text.isdigit() else self._limit + 1
            if total > self._limit:
                total = _remove_oldest(folder, int(KEPT_SHARE * self._limit) - size) + size
            counter.truncate(0)
            counter.write(str(total).encode())


@cache
def chunk_cache(folder: str | None, limit_bytes: int, processes: int) -> ChunkCache:
    """Return the cache of this process with these arguments, which all its datasets share."""
    return ChunkCache(None if folder is None else Path(folder).expanduser(), limit_bytes, processes)


def _remove_oldest(folder: Path, most_bytes: int) -> int:
    """Remove the least recently used files of a cache folder; return the bytes that are left."""
    chunks, now = [], time.time()
    folders = [each for each in folder.glob("??") if not each.is_symlink()]
    for path in chain.from_iterable(each.glob(f"*{_SUFFIX}") for each in folders):
        with suppress(FileNotFoundError):  # removed by another process
            status = path.lstat()
            is_left = path.name.startswith(".") and now - status.st_mtime > _STALE_SECONDS  # by a killed process
            if is_left or not path.name.startswith("."):
                chunks.append((0.0 if is_left else status.st_mtime, status.st_size, path))
    left = sum(size for _, size, _ in chunks)
    for _, size, path in sorted(chunks):
        if left <= most_bytes:
            break
        path.unlink(missing_ok=True)
        left -= size
    return left


class StoreFile:
    """A token file in a store, with the interface of `OpenFile`.

    Args:
        tag: of the listed version.
        cuts: [chunks + 1] int64, bytes of the file before each chunk, then all.
    """

    def __init__(self, place: StorePath, size: int, tag: int, cuts: np.ndarray, cache: ChunkCache) -> None:
        self._place, self._tag, self._cache = place, tag, cache
        version = hashlib.blake2b(f"{place.identity}\0{size}\0{tag}".encode(), digest_size=8).hexdigest()
        self.cuts: list[int] = cuts.tolist()
        self.keys = [f"{version}-{begin}-{end}" for begin, end in pairwise(self.cuts)]
        self._opened: list[pyarrow.NativeFile] = []
        self._failures: dict[int, tuple[float, str]] = {}

    def part(self, begin: int, end: int) -> ReadableChunk:
        """Return what reads bytes [begin, end) faster: their chunk, if it is one."""
        number = bisect_right(self.cuts, begin) - 1
        return self.chunk(number) if end <= self.cuts[number + 1] else self

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file; raise a DataError if it cannot be had, or has changed."""
        while len(target):
            number = bisect_right(self.cuts, offset) - 1
            count = min(len(target), self.cuts[number + 1] - offset)
            self.chunk(number).read_into(target[:count], offset)
            target, offset = target[count:], offset + count

    def chunk(self, number: int) -> ReadableChunk:
        """Return a chunk by its number; fetch it if it is missing."""
        return self._cache.peek(self.keys[number]) or self._cache.get(self, number)

    def fetch(self, number: int) -> bytes:
        """Read a chunk from the store. Opening the object again after the read tells the version that was read."""
        begin, end = self.cuts[number : number + 2]

        def read(store: Store) -> bytes:
            file = self._opened.pop() if self._opened else self._open(store)
            content = store.read_at(self._place.key, file, begin, end - begin)
            self._opened.append(self._open(store))
            return content

        failed_at, problem = self._failures.get(number, (-FAILED_SECONDS, ""))
        if time.monotonic() - failed_at < FAILED_SECONDS:  # each sample in the chunk would wait as long
            raise DataError(problem)
        try:
            return self._place.ask(read, TRIES)
        except StoreError as error:
            self._failures[number] = time.monotonic(), str(error)
            raise DataError(str(error)) from error

    def _open(self, store: Store) -> pyarrow.NativeFile:
        opened = store.open(self._place.key)
        if opened is None or opened[1] != self._tag:
            what = "is gone" if opened is None else "is another version"
            problem = f"{what} since the job listed it: start again, so that it is looked at"
            raise DataError(problem, path=self._place)
        return opened[0]


class ChunkCuts:
    """The ends of a dataset's chunks: the ends of its blocks of documents and of its files, and every 4 MiB.

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
        self._firsts = self.cuts.searchsorted(self.bases)  # number of the first chunk of each file

    def of_file(self, number: int) -> np.ndarray:
        """Return the bytes of a file before each of its chunks, then all."""
        first, last = self._firsts[number : number + 2]
        cuts: np.ndarray = self.cuts[first : last + 1] - self.bases[number]
        return cuts

    def chunks_of(self, files: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
        """Return files and numbers in them of the chunks that hold ranges of bytes of files, all [n]."""
        firsts = self.cuts.searchsorted(self.bases[files] + begins, "right") - 1
        counts = self.cuts.searchsorted(self.bases[files] + ends) - firsts
        numbers = np.unique(np.repeat(firsts, counts) + _ranges(counts))
        holders = self._firsts.searchsorted(numbers, "right") - 1
        return list(zip(holders.tolist(), (numbers - self._firsts[holders]).tolist(), strict=True))


def _ranges(counts: np.ndarray) -> np.ndarray:
    """Return 0, 1, … up to each count, end to end."""
    ranges: np.ndarray = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranges
