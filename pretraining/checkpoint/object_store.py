"""Folder in an object store, and its checkpoints. pyarrow connects to S3, Google Cloud Storage, Azure and disks.

    <address>/checkpoints/step_1000_ckp/<files>, manifest.json    address of a run: the manifest is written last
    <address>/<files>, manifest.json                              address of a checkpoint

A folder without a manifest, or with files of other sizes, is no complete checkpoint. A fetch compares files with the
checksums in the manifest, and the checkpoint appears complete or not at all. Credentials come from the environment.
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
REST_RATIO = 49
"""Seconds that an upload pauses per second of CPU time. A model on a CPU waits for the slowest core in each step, so an
upload on one core slows all cores (docs/performance.md)."""
TRIES_OF_START = 5
LOG_SECONDS = 60.0
"""Time between two log lines about a failing store."""
LONGEST_PAUSE_SECONDS = 30.0


class StoreError(CheckpointError):
    """A call of a store has failed; the next try may succeed."""


class Store:
    """Folder in an object store; object names are relative to it.

    Attributes:
        address: without its query (after the question mark).
        problem: last error of the store; empty if there was none.

    Raises:
        CheckpointError: the address is of an unknown kind, or contains credentials.
    """

    def __init__(self, address: str) -> None:
        if (problem := address_problem(address)) is not None:
            raise CheckpointError(f"an address that {problem}")
        self.address = address.partition("?")[0].rstrip("/")
        self.problem = ""
        with self._as_store_error(""):
            self._system, self._root = _connect(address)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if the object does not exist."""
        with self._as_store_error(name):
            try:
                with self._system.open_input_stream(self._path(name)) as stream:
                    return bytes(stream.read())
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._write(name, [content], len(content))

    def upload(
        self, file: Path, name: str, entry: FileEntry, stop: threading.Event, full_speed: threading.Event
    ) -> None:
        """Write a checkpoint's file as an object.

        Args:
            stop: stops the upload when set.
            full_speed: until it is set, the thread pauses most of the time.

        Raises:
            OSError: the file cannot be read.
            CheckpointError: the file does not have the checksum in its manifest.
        """
        checksum = 0

        def pieces() -> Iterator[bytes]:
            nonlocal checksum
            with file.open("rb", buffering=0) as source:
                began = thread_time()
                while (piece := source.read(PIECE_BYTES)) and not stop.is_set():
                    checksum = zlib.crc32(piece, checksum)
                    yield piece
                    full_speed.wait(REST_RATIO * (thread_time() - began))
                    began = thread_time()

        self._write(name, pieces(), entry.bytes)
        if crc32_text(checksum) != entry.crc32:
            raise CheckpointError("damaged: its checksum differs from its manifest", path=file)

    def download(self, name: str, file: Path) -> FileEntry:
        """Write an object to a file and flush it to disk; return its size and checksum."""
        checksum = 0
        with file.open("wb", buffering=0) as target:
            with self._as_store_error(name):
                stream = self._system.open_input_stream(self._path(name))
            with stream:
                while piece := self._next_piece(stream, name):
                    checksum = zlib.crc32(piece, checksum)
                    target.write(piece)
            os.fsync(target.fileno())
            return FileEntry(target.tell(), crc32_text(checksum))

    def sizes(self) -> dict[str, int]:
        """Return the size of every object by its name."""
        selector = pyarrow.fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        with self._as_store_error(""):
            found = self._system.get_file_info(selector)
        files = [info for info in found if info.type == pyarrow.fs.FileType.File]
        return {info.path.removeprefix(self._root).lstrip("/"): info.size for info in files}

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with everything in it."""
        with self._as_store_error(name), suppress(FileNotFoundError):
            if self._system.get_file_info(self._path(name)).type == pyarrow.fs.FileType.File:
                self._system.delete_file(self._path(name))
            else:
                self._system.delete_dir(self._path(name))

    def retry(self, action: Callable[[], T], stop: threading.Event, tries: int = 0) -> T:
        """Repeat an action until the store does it, and log the error once per minute.

        Args:
            stop: ends the retries when set.
            tries: maximum; 0 = any number.

        Raises:
            StoreError: the last try has failed, or a try after `stop` was set.
        """
        pause, logged = 1.0, -LOG_SECONDS
        for number in count(1):
            try:
                return action()
            except StoreError as error:
                if number == tries or stop.is_set():
                    raise
                if monotonic() - logged >= LOG_SECONDS:
                    logged = monotonic()
                    log.warning("%s; trying again", error)
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the loop has no end")

    def _write(self, name: str, pieces: Iterable[bytes], size: int) -> None:
        path = self._path(name)
        with self._as_store_error(name):
            if isinstance(self._system, pyarrow.fs.LocalFileSystem):
                self._system.create_dir(path.rpartition("/")[0])
            stream = self._system.open_output_stream(path)
        try:
            for piece in pieces:
                with self._as_store_error(name):
                    stream.write(piece)
                    stream.flush()  # otherwise some file systems buffer without a limit, and upload in the background
        finally:
            with self._as_store_error(name):
                stream.close()
        with self._as_store_error(name):
            written = self._system.get_file_info(path).size
            if written != size:
                raise OSError(f"the object has {written or 0:,} bytes instead of {size:,}")

    def _next_piece(self, stream: Any, name: str) -> bytes:
        with self._as_store_error(name):
            return bytes(stream.read(PIECE_BYTES))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    @contextmanager
    def _as_store_error(self, name: str) -> Iterator[None]:
        """Turn pyarrow's errors about a store into a `StoreError`."""
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
    # By default, a stream of a slow store buffers whole files, and a request times out after three seconds.
    system = pyarrow.fs.S3FileSystem(background_writes=False, connect_timeout=10, request_timeout=60, **query)
    return system, f"{parts.netloc}{parts.path}".rstrip("/")


# Checkpoints


def checkpoints_in(store: Store, *, needed: bool = False) -> dict[str, Manifest]:
    """Return the manifests of a store's complete checkpoints by folder, ordered by step.

    The folder is "" if the address is that of a checkpoint.

    Args:
        needed: whether to refuse a store in which no checkpoint is complete; an empty store is fine.

    Raises:
        StoreError: the store cannot be read.
        CheckpointError: no checkpoint is complete.
    """
    sizes = store.sizes()
    form = re.compile(rf"((?:{CHECKPOINTS}/[^/]+/)?){re.escape(MANIFEST)}")
    prefixes = [match[1] for name in sizes if (match := form.fullmatch(name))]

    def read(prefix: str) -> Manifest | None:
        content = store.read(prefix + MANIFEST)
        try:
            manifest = Manifest.parse(parse_json(content or b""), f"{store.address}/{prefix}{MANIFEST}")
        except (CheckpointError, ValueError) as error:
            log.warning("%s/%s is skipped: %s", store.address, prefix, error)
            return None
        is_complete = all(sizes.get(prefix + name) == entry.bytes for name, entry in manifest.files.items())
        return manifest if is_complete else None

    with ThreadPoolExecutor(READING_THREADS) as pool:
        found = list(zip(prefixes, pool.map(read, prefixes), strict=True))
    complete = [(prefix.rstrip("/"), manifest) for prefix, manifest in found if manifest is not None]
    if needed and found and not complete:
        raise CheckpointError(f"holds {len(found)} checkpoints, but no complete one", path=store.address)
    return dict(sorted(complete, key=lambda each: (each[1].step, each[1].kind != "preempt")))


def fetch_newest(store: Store, found: Mapping[str, Manifest], target: Path) -> Path | None:
    """Fetch the newest good checkpoint of `checkpoints_in` into a folder; return None if all are damaged.

    Raises:
        CheckpointError: a checkpoint cannot be fetched or written.
    """
    for folder, manifest in reversed(list(found.items())):
        path = target / _checkpoint_name(store, folder)
        log.info("fetching %s/%s to %s", store.address, folder, path)
        try:
            fault = _fetch(store, folder, manifest, path)
        except OSError as error:
            raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from None
        if fault is None:
            return path
        log.warning("%s/%s is damaged: %s", store.address, folder, fault)
    return None


def _fetch(store: Store, folder: str, manifest: Manifest, path: Path) -> str | None:
    """Fetch a checkpoint, in place of a damaged one if any; return what is wrong with it, or None."""
    temporary, prefix, stop = temporary_name(path), f"{folder}/".lstrip("/"), threading.Event()
    if fault := next(misnamed_files(temporary, manifest), None):
        return fault

    def fetch(name: str) -> str | None:
        entry = store.retry(lambda: store.download(prefix + name, temporary / name), stop, TRIES_OF_START)
        return None if entry == manifest.files[name] else f"size or checksum of {name} differs from the manifest"

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


def _checkpoint_name(store: Store, folder: str) -> str:
    return Path(folder or store.address).name


@contextmanager
def local_view(address: str, *, with_files: bool) -> Iterator[Path]:
    """Provide a temporary folder like that of the run at an address.

    Args:
        with_files: whether to fetch the newest checkpoint. Otherwise the folder holds the manifests of all checkpoints,
            and sparse files of the right sizes.

    Raises:
        CheckpointError: there is no checkpoint, or the store cannot be used.
    """
    store = Store(address)
    with tempfile.TemporaryDirectory(prefix="pretrain-") as name:
        run = Path(name) / "run"
        found = checkpoints_in(store)
        if not found or (with_files and fetch_newest(store, found, run / CHECKPOINTS) is None):
            raise CheckpointError("holds no complete and good checkpoint", path=store.address)
        for folder, manifest in ({} if with_files else found).items():
            path = run / CHECKPOINTS / _checkpoint_name(store, folder)
            path.mkdir(parents=True)
            for file, entry in manifest.files.items():
                with (path / Path(file).name).open("wb") as empty:
                    empty.truncate(entry.bytes)
            (path / MANIFEST).write_bytes(store.read(f"{folder}/{MANIFEST}".lstrip("/")) or b"")
        yield run
