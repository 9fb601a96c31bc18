"""Folder in an object store, and its checkpoints. pyarrow connects to S3, Google Cloud Storage, Azure and disks.

    <address>/checkpoints/step_1000_ckp/<files>, manifest.json    address of a run: the manifest is written last
    <address>/<files>, manifest.json                              address of a checkpoint

A folder without a manifest, or with files of other sizes, is no complete checkpoint. A fetch compares files with the
checksums in the manifest, and the checkpoint appears complete or not at all. Credentials come from the environment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from time import monotonic, thread_time
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs
from pyarrow.lib import ArrowException

from pretraining.checkpoint.forms import misnamed_files
from pretraining.checkpoint.manifest import MANIFEST, FileEntry, Manifest, crc32_text, size_fault
from pretraining.checkpoint.own_checkpoints import Copies, Copy
from pretraining.checkpoint.run_folder import CHECKPOINTS, SET_ASIDE, SET_ASIDE_FILE, temporary_name
from pretraining.errors import CheckpointError, DamagedError
from pretraining.files import address_problem, exists, flush_folder, parse_json, write_atomic
from pretraining.model.hf import ORIGIN_FILE

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
            CheckpointError: the file does not have the size and the checksum in its manifest.
        """
        checksum = 0
        if fault := size_fault(file, entry):  # before the store: it would seem to have lost the bytes
            raise CheckpointError(fault)

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


def read_copies(address: str) -> Copies:
    """List the checkpoints in a store.

    Raises:
        StoreError: the store cannot be read.
        CheckpointError: the address cannot be used.
    """
    store = Store(address)
    sizes = store.sizes()
    form = re.compile(rf"((?:{CHECKPOINTS}/[^/]+/)?)(?:{re.escape(MANIFEST)}|{re.escape(SET_ASIDE_FILE)})")
    names = [name for name in sizes if form.fullmatch(name)]

    def read(name: str) -> Manifest | None:
        try:
            return Manifest.parse(parse_json(store.read(name) or b""), f"{store.address}/{name}")
        except (CheckpointError, ValueError) as error:
            log.warning("%s/%s is skipped: %s", store.address, name, error)
            return None

    with ThreadPoolExecutor(READING_THREADS) as pool:
        manifests = dict(zip(names, pool.map(read, names), strict=True))
    found, set_aside, incomplete = list[Copy](), dict[str, Manifest](), 0
    for name, manifest in manifests.items():
        folder, _, file = name.rpartition("/")
        if file == SET_ASIDE_FILE:
            if manifest is not None:
                set_aside[Path(folder).name] = manifest
        elif manifest is None or any(
            sizes.get(f"{folder}/{each}".lstrip("/")) != entry.bytes for each, entry in manifest.files.items()
        ):
            incomplete += 1
        else:
            found.append(Copy(address, folder, manifest))
    found.sort(key=lambda each: (each.manifest.step, each.manifest.kind != "preempt"))
    return Copies({each.name: each for each in found}, set_aside, incomplete)


def fetch_copy(copy: Copy, path: Path) -> None:
    """Fetch a checkpoint to a path of a run, in place of a damaged one if any, and the origin of its run.

    Raises:
        DamagedError: a file does not have the checksum in the manifest.
        CheckpointError: the store cannot be read, or the disk cannot be written.
    """
    log.info("fetching %s to %s", copy, path)
    try:
        fault = _fetch(Store(copy.address), copy.folder, copy.manifest, path)
        _fetch_origin(copy, path.parents[1])
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", path=path) from None
    if fault is not None:
        raise DamagedError(f"damaged: {fault}", path=str(copy))


def _fetch_origin(copy: Copy, run: Path) -> None:
    """Fetch the record of the model that the run of a copy began with, if only the store has it."""
    address, _, query = copy.address.partition("?")
    root = address.rstrip("/") if copy.folder else address.rstrip("/").rsplit("/", 2)[0]
    content = None if exists(run / ORIGIN_FILE) else Store(f"{root}?{query}" if query else root).read(ORIGIN_FILE)
    if content is not None:
        write_atomic(run / ORIGIN_FILE, content)


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


@contextmanager
def local_view(address: str, *, with_files: bool) -> Iterator[Path]:
    """Provide a temporary folder like that of the run at an address.

    Args:
        with_files: whether to fetch the newest good checkpoint. Otherwise the folder holds the manifests of all
            checkpoints, also of those set aside, and sparse files of the right sizes.

    Raises:
        CheckpointError: there is no checkpoint, or the store cannot be used.
    """
    listed = read_copies(address)
    copies = list(listed.complete.values())
    with tempfile.TemporaryDirectory(prefix="pretrain-") as name:
        run = Path(name) / "run"
        is_empty = True
        for copy in reversed(copies):
            try:
                _view(copy, run / CHECKPOINTS / copy.name, with_files=with_files)
            except DamagedError as error:
                log.warning(str(error))
                continue
            is_empty = False
            if with_files:
                break
        for folder, manifest in listed.set_aside.items() if not with_files else ():
            if folder not in listed.complete:  # otherwise its files belong to the checkpoint that was saved again
                copy = Copy(address, f"{CHECKPOINTS}/{folder}", manifest)
                _view(copy, run / CHECKPOINTS / f"{SET_ASIDE}copies" / folder, with_files=False)
        if is_empty:
            raise CheckpointError("holds no complete and good checkpoint", path=address.partition("?")[0])
        yield run


def _view(copy: Copy, path: Path, *, with_files: bool) -> None:
    if with_files:
        fetch_copy(copy, path)
        return
    path.mkdir(parents=True)
    for file, entry in copy.manifest.files.items():
        with (path / Path(file).name).open("wb") as empty:
            empty.truncate(entry.bytes)
    (path / MANIFEST).write_text(json.dumps(copy.manifest.document()))
