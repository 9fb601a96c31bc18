"""A folder in an object store, and the checkpoints in it. pyarrow speaks to S3, Google Cloud Storage, Azure and disks.

    <address>/checkpoints/step_1000_ckp/<files>, manifest.json    of a run: the manifest comes last
    <address>/<files>, manifest.json                              of a checkpoint

A checkpoint without a manifest, or whose files have other sizes, is none. What is fetched is compared with the
checksums in the manifest, and appears complete or not at all. Credentials come from the environment.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs
from pyarrow.lib import ArrowException

from pretraining.checkpoint.manifest import MANIFEST, FileEntry, Manifest, crc32_text, misnamed_files
from pretraining.checkpoint.run_folder import CHECKPOINTS, temporary_name
from pretraining.errors import CheckpointError
from pretraining.files import address_problem, exists, flush_folder, parse_json

T = TypeVar("T")

log = logging.getLogger(__name__)

PIECE_BYTES = 2**22
READING_THREADS = 8
RESTS = 49
"""Seconds that an upload rests per second of a core. Each step of a model on a CPU waits for the slowest core, so what
one of them does besides is lost to all (docs/performance.md)."""
TRIES_OF_START = 5
LOG_SECONDS = 60.0
"""Between two lines about a store that does not answer."""
LONGEST_PAUSE_SECONDS = 30.0


class StoreError(CheckpointError):
    """A store does not do what it is asked; the next try may succeed."""


class Store:
    """A folder in an object store; names are relative to it.

    Attributes:
        address: without what follows a question mark.
        problem: what the store said last; empty if it always did what it was asked.

    Raises:
        CheckpointError: the address is of no known kind, or holds credentials.
    """

    def __init__(self, address: str) -> None:
        if (problem := address_problem(address)) is not None:
            raise CheckpointError(f"an address that {problem}")
        self.address = address.partition("?")[0].rstrip("/")
        self.problem = ""
        with self._talking(""):
            self._system, self._root = _connect(address)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if there is none."""
        with self._talking(name):
            try:
                with self._system.open_input_stream(self._path(name)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._write(name, [content], len(content))

    def upload(
        self, file: Path, name: str, entry: FileEntry, ending: threading.Event, hurried: threading.Event
    ) -> None:
        """Write a file of a checkpoint as an object.

        Args:
            ending: gives up as soon as it is set.
            hurried: until it is set, the thread rests most of the time.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: the file is not what was saved.
        """
        checksum = 0

        def pieces() -> Iterator[bytes]:
            nonlocal checksum
            with file.open("rb", buffering=0) as source:
                began = thread_time()
                while (piece := source.read(PIECE_BYTES)) and not ending.is_set():
                    checksum = zlib.crc32(piece, checksum)
                    yield piece
                    hurried.wait(RESTS * (thread_time() - began))
                    began = thread_time()

        self._write(name, pieces(), entry.bytes)
        if crc32_text(checksum) != entry.crc32:
            raise CheckpointError("damaged: it has another checksum than its manifest says", path=file)

    def download(self, name: str, file: Path) -> FileEntry:
        """Write an object to a file, flushed; return its size and checksum."""
        checksum = 0
        with file.open("wb", buffering=0) as target:
            with self._talking(name):
                stream = self._system.open_input_stream(self._path(name))
            with stream:
                while piece := self._next_piece(stream, name):
                    checksum = zlib.crc32(piece, checksum)
                    target.write(piece)
            os.fsync(target.fileno())
            return FileEntry(target.tell(), crc32_text(checksum))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every object by its name."""
        selector = pyarrow.fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        with self._talking(""):
            found = self._system.get_file_info(selector)
        files = [info for info in found if info.type == pyarrow.fs.FileType.File]
        return {info.path.removeprefix(self._root).lstrip("/"): info.size for info in files}

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with all that is in it."""
        with self._talking(name), suppress(FileNotFoundError):
            if self._system.get_file_info(self._path(name)).type == pyarrow.fs.FileType.File:
                self._system.delete_file(self._path(name))
            else:
                self._system.delete_dir(self._path(name))

    def persist(self, action: Callable[[], T], ending: threading.Event, tries: int = 0) -> T:
        """Do something with the store until it succeeds, and log what prevents it each minute.

        Args:
            tries: the most; 0 = any number.

        Raises:
            StoreError: the last try failed, or one did once `ending` was set.
        """
        pause, logged = 1.0, -LOG_SECONDS
        for number in count(1):
            try:
                return action()
            except StoreError as error:
                if number == tries or ending.is_set():
                    raise
                if monotonic() - logged >= LOG_SECONDS:
                    logged = monotonic()
                    log.warning("%s; it is tried again", error)
                ending.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the loop has no end")

    def _write(self, name: str, pieces: Iterable[bytes], size: int) -> None:
        path = self._path(name)
        with self._talking(name):
            if isinstance(self._system, pyarrow.fs.LocalFileSystem):
                self._system.create_dir(path.rpartition("/")[0])
            stream = self._system.open_output_stream(path)
        try:
            for piece in pieces:
                with self._talking(name):
                    stream.write(piece)
                    stream.flush()  # some systems upload in the background, from memory without a bound
        finally:
            with self._talking(name):
                stream.close()
        with self._talking(name):
            written = self._system.get_file_info(path).size
            if written != size:
                raise OSError(f"it holds {written or 0:,} bytes in place of {size:,}")

    def _next_piece(self, stream: Any, name: str) -> bytes:
        with self._talking(name):
            return bytes(stream.read(PIECE_BYTES))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _talking(self, name: str) -> Iterator[None]:
        """Turn what pyarrow says about a store into a `StoreError`."""
        try:
            yield
        except (OSError, ArrowException) as error:
            self.problem = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreError(f"cannot be used: {self.problem}", path=f"{self.address}/{name}") from error


def _connect(address: str) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of an address, and the path in it."""
    parts = urlsplit(address)
    if parts.scheme != "s3":
        system, path = pyarrow.fs.FileSystem.from_uri(address)
        return system, path.rstrip("/")
    query = dict(parse_qsl(parts.query))
    if not query.keys() & {"region", "endpoint_override"}:
        query["region"] = pyarrow.fs.resolve_s3_region(parts.netloc)
    # By default a stream buffers whole files if the store is slow, and a request has three seconds.
    system = pyarrow.fs.S3FileSystem(background_writes=False, connect_timeout=10, request_timeout=60, **query)
    return system, f"{parts.netloc}{parts.path}".rstrip("/")


# Checkpoints


def checkpoints_in(store: Store, *, needed: bool = False) -> dict[str, Manifest]:
    """Return the manifests of the complete checkpoints in a store by their folders, in the order of steps.

    The folder is "" if the address is that of a checkpoint.

    Args:
        needed: whether to refuse a store that holds checkpoints of which none is complete.

    Raises:
        StoreError: the store cannot be read.
        CheckpointError: none is complete.
    """
    sizes = store.sizes()
    form = re.compile(rf"((?:{CHECKPOINTS}/[^/]+/)?){re.escape(MANIFEST)}")
    prefixes = [match[1] for name in sizes if (match := form.fullmatch(name))]

    def read(prefix: str) -> Manifest | None:
        content = store.read(prefix + MANIFEST)
        try:
            manifest = Manifest.parse(parse_json(content or b""), f"{store.address}/{prefix}{MANIFEST}")
        except (CheckpointError, ValueError) as error:
            log.warning("%s/%s is passed over: %s", store.address, prefix, error)
            return None
        is_complete = all(sizes.get(prefix + name) == entry.bytes for name, entry in manifest.files.items())
        return manifest if is_complete else None

    with ThreadPoolExecutor(READING_THREADS) as pool:
        found = list(zip(prefixes, pool.map(read, prefixes), strict=True))
    complete = [(prefix.rstrip("/"), manifest) for prefix, manifest in found if manifest is not None]
    if needed and found and not complete:
        raise CheckpointError(f"holds {len(found)} checkpoints, and none is complete", path=store.address)
    return dict(sorted(complete, key=lambda each: (each[1].step, each[1].kind != "preempt")))


def fetch_newest(store: Store, found: Mapping[str, Manifest], target: Path) -> Path | None:
    """Fetch the newest checkpoint that is not damaged into a folder of checkpoints; None if all are damaged.

    Args:
        found: as `checkpoints_in` returns them.

    Raises:
        CheckpointError: one cannot be read or written.
    """
    for folder, manifest in reversed(list(found.items())):
        path = target / _name_of(store, folder)
        log.info("%s/%s is fetched to %s", store.address, folder, path)
        try:
            fault = _fetch(store, folder, manifest, path)
        except OSError as error:
            raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from None
        if fault is None:
            return path
        log.warning("%s/%s is damaged: %s", store.address, folder, fault)
    return None


def _fetch(store: Store, folder: str, manifest: Manifest, path: Path) -> str | None:
    """Fetch a checkpoint in place of one that is damaged, if any; return what is wrong with it, if anything."""
    temporary, prefix, ending = temporary_name(path), f"{folder}/".lstrip("/"), threading.Event()
    if fault := next(misnamed_files(temporary, manifest), None):
        return fault

    def fetch(name: str) -> str | None:
        entry = store.persist(lambda: store.download(prefix + name, temporary / name), ending, TRIES_OF_START)
        return None if entry == manifest.files[name] else f"{name} is not what was written"

    temporary.mkdir(parents=True)
    try:
        with ThreadPoolExecutor(READING_THREADS) as pool:
            fault = next(filter(None, list(pool.map(fetch, manifest.files))), None)
        if fault is None:
            store.download(prefix + MANIFEST, temporary / MANIFEST)
            flush_folder(temporary)
            if exists(path):
                path.rename(temporary_name(path))  # the next save removes it
            temporary.rename(path)
            flush_folder(path.parent)
        return fault
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _name_of(store: Store, folder: str) -> str:
    return Path(folder or store.address).name


@contextmanager
def local_view(address: str, *, with_files: bool) -> Iterator[Path]:
    """Give a temporary folder like that of the run at an address.

    Args:
        with_files: whether to fetch its newest checkpoint. Otherwise it holds the manifests of all, and files of the
            right sizes without content.

    Raises:
        CheckpointError: there is no checkpoint, or the store cannot be used.
    """
    store = Store(address)
    with tempfile.TemporaryDirectory(prefix="pretrain-") as name:
        run = Path(name) / "run"
        found = checkpoints_in(store)
        if not found or (with_files and fetch_newest(store, found, run / CHECKPOINTS) is None):
            raise CheckpointError("holds no complete checkpoint that is good", path=store.address)
        for folder, manifest in ({} if with_files else found).items():
            path = run / CHECKPOINTS / _name_of(store, folder)
            path.mkdir(parents=True)
            for file, entry in manifest.files.items():
                with (path / Path(file).name).open("wb") as empty:
                    empty.truncate(entry.bytes)
            (path / MANIFEST).write_bytes(store.read(f"{folder}/{MANIFEST}".lstrip("/")) or b"")
        yield run
