"""Folder in an object store. pyarrow connects to S3, Google Cloud Storage, Azure and disks.

    Store("s3://bucket/runs/mine").read("config.yaml")
    read_json(location("s3://bucket/tokens?region=eu-west-1") / "web/prepare.json")

Credentials come from the environment. Calls fail with a `StoreError`; `Store.retry` repeats them. A `StorePath` is used
like a `Path`, and repeats its calls itself. A disk's file:// is a `Path`.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import TypeVar

import pyarrow.fs
from pyarrow.lib import ArrowException

from pretraining.errors import PathError, PretrainError
from pretraining.files import Address, Location, address_problem, is_address, join_names, parse_address

T = TypeVar("T")

log = logging.getLogger(__name__)

PIECE_BYTES = 2**22
LOG_SECONDS = 60.0
"""Time between two log lines about a failing store."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
TRIES_OF_PATH = 5
"""Tries of a call of a `StorePath`, within about 15 seconds of pauses."""
REQUESTS = 32
"""Requests to a store at once by one process."""
_LARGEST = 2**30 + 1
_VERSION = ("etag", "last-modified", "generation", "updated")
"""Names that stores have for the version of an object and its time; other facts may change without a new version."""


class StoreError(PretrainError):
    """A call of a store has failed; the next try may succeed."""


class Store:
    """Folder in an object store; object names are relative to it.

    Attributes:
        address: without its query (after the question mark).
        problem: last error of the store; empty if there was none.

    Raises:
        StoreError: (all calls) the store fails; the constructor: the address is of an unknown kind, or contains
            credentials.
    """

    def __init__(self, address: str) -> None:
        if (problem := address_problem(address)) is not None:
            raise StoreError(f"an address that {problem}")
        self._place = parse_address(address)
        self.address = self._place.place
        self.problem = ""
        self._has_bucket = self._place.is_on_disk
        self.connect()

    def connect(self) -> None:
        """Connect again, with the credentials that the environment gives now."""
        with self._as_store_error(""):
            self._system, self._root = _connect(self._place)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if the object does not exist."""
        path = self._path(name)
        with self._as_store_error(name), suppress(FileNotFoundError), self._system.open_input_stream(path) as stream:
            return bytes(stream.read())
        return None

    def open(self, name: str) -> tuple[pyarrow.NativeFile, int] | None:
        """Open an object for reading by position; None if the object does not exist.

        Returns:
            The file, and the object's tag: a hash below 2**63 of what the store says of its version (its own tag, size
            and time). Another version of an object has another tag.
        """
        with self._as_store_error(name), suppress(FileNotFoundError):
            file = self._system.open_input_file(self._path(name))
            told = {name.lower(): value for name, value in (file.metadata() or {}).items()}
            version = repr([file.size(), *(told.get(name) for name in _VERSION)]).encode()
            return file, int.from_bytes(hashlib.blake2b(version, digest_size=8).digest(), "little") >> 1
        return None

    def read_at(self, name: str, file: pyarrow.NativeFile, begin: int, size: int) -> bytes:
        """Return some bytes of an opened object; a StoreError if the answer is shorter."""
        with self._as_store_error(name):
            content = bytes(file.read_at(size, begin))
            if len(content) < size:
                raise OSError(f"the answer has {len(content):,} of {size:,} bytes from byte {begin:,} on")
            return content

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of an object in order."""
        with self._as_store_error(name), self._system.open_input_stream(self._path(name)) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield bytes(piece)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size of every object in a folder by its name in it."""
        return {name: info.size for name, info in self.entries(folder).items() if info.is_file}

    def entries(self, folder: str = "", *, recursive: bool = True) -> dict[str, pyarrow.fs.FileInfo]:
        """Return what the store says of the objects and folders in a folder, by their names in it."""
        root = self._path(folder)
        selector = pyarrow.fs.FileSelector(root, recursive=recursive, allow_not_found=True)
        with self._as_store_error(folder):
            infos = self._system.get_file_info(selector)
        self._check_bucket(is_known=bool(infos))
        return {info.path[len(root) + 1 :]: info for info in infos}

    def info(self, name: str) -> pyarrow.fs.FileInfo:
        """Return what the store says of an object or folder."""
        with self._as_store_error(name):
            info = self._system.get_file_info(self._path(name))
        self._check_bucket(is_known=info.type != pyarrow.fs.FileType.NotFound)
        return info

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object, and compare its size; errors of `pieces` are raised as they are."""
        path, size = self._path(name), 0
        with self._as_store_error(name):
            if isinstance(self._system, pyarrow.fs.LocalFileSystem):
                self._system.create_dir(path.rpartition("/")[0])
            stream = self._system.open_output_stream(path)
        try:
            for piece in pieces:
                size += len(piece)
                with self._as_store_error(name):
                    stream.write(piece)
                    stream.flush()  # otherwise some file systems buffer without a limit, and upload in the background
        finally:
            with self._as_store_error(name):
                stream.close()
        written = self.info(name).size  # None: there is no object
        if written != size:
            with self._as_store_error(name):
                raise OSError(f"the object has {written or 0:,} bytes instead of {size:,}")

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with everything in it, if there is one."""
        path = self._path(name)
        with self._as_store_error(name), suppress(FileNotFoundError):
            kind = self._system.get_file_info(path).type
            if kind == pyarrow.fs.FileType.File:
                self._system.delete_file(path)
            elif kind == pyarrow.fs.FileType.Directory:
                self._system.delete_dir(path)

    def retry(self, action: Callable[[], T], stop: threading.Event, tries: int = 0) -> T:
        """Repeat an action until the store does it, and log the error once per minute.

        Args:
            stop: ends the retries when set.
            tries: maximum; 0 = any number.

        Raises:
            StoreError: the last try has failed, or a try after `stop` was set.
        """
        pause, logged = FIRST_PAUSE_SECONDS, -LOG_SECONDS
        for number in count(1):
            try:
                return action()
            except StoreError as error:
                if number == tries or stop.is_set():
                    raise
                with suppress(StoreError):
                    self.connect()  # temporary credentials may have expired
                if monotonic() - logged >= LOG_SECONDS:
                    logged = monotonic()
                    log.warning("%s; trying again", error)
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("the loop has no end")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _check_bucket(self, *, is_known: bool) -> None:
        """Raise a PathError if the bucket does not exist; credentials that may not ask for it do not tell."""
        self._has_bucket |= is_known
        if not self._has_bucket:
            with suppress(OSError, ArrowException):
                if self._system.get_file_info(self._root.partition("/")[0]).type == pyarrow.fs.FileType.NotFound:
                    problem = "there is no such bucket. Check its name, the endpoint and the credentials"
                    raise PathError(problem, path=self._place.bucket)
            self._has_bucket = True

    @contextmanager
    def _as_store_error(self, name: str) -> Iterator[None]:
        """Turn pyarrow's errors about a store into a `StoreError`."""
        try:
            yield
        except (OSError, ArrowException, UnicodeError) as error:
            self.problem = (str(error).splitlines() or [type(error).__name__])[0]
            raise StoreError(f"cannot be used: {self.problem}", path=f"{self.address}/{name}") from error


class StorePath:
    """A file or folder in a store, used like a `Path`. There are no links, and no empty folders.

    Its text, in messages and keys, is the address without the query.

    Attributes:
        key: path in the bucket.
        query: parameters of the address; or empty.

    Raises:
        StoreError: (calls that read) the store has failed several times.
    """

    def __init__(self, bucket: str, key: str, query: str = "") -> None:
        self._bucket, self.key, self.query = bucket, join_names(key), query

    def __str__(self) -> str:
        return f"{self._bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self._bucket, join_names(self.key, name), self.query)

    @property
    def address(self) -> str:
        """The address with its query."""
        return Address(self._bucket, self.key, self.query).text

    @property
    def identity(self) -> str:
        """Endpoint, scheme, bucket and name."""
        endpoint = Address(self._bucket, self.key, self.query).parameters.get("endpoint_override", "")
        return f"{endpoint.rpartition('://')[2].rstrip('/')}{self}"

    @property
    def name(self) -> str:
        """Last part."""
        return self.parts[-1]

    @property
    def parts(self) -> tuple[str, ...]:
        """The bucket and the parts of the path in it."""
        return (self._bucket, *filter(None, self.key.split("/")))

    @property
    def parent(self) -> StorePath:
        """The folder that holds this path; the bucket is its own."""
        return StorePath(self._bucket, self.key.rpartition("/")[0], self.query)

    def with_suffix(self, suffix: str) -> StorePath:
        """Return the path with another suffix."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def absolute(self) -> StorePath:
        """Return the path itself."""
        return self

    def stat(self) -> os.stat_result:
        """Return kind and size; raise a FileNotFoundError if there is nothing."""
        info = self.ask(lambda store: store.info(self.key))
        if info.type == pyarrow.fs.FileType.NotFound:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        # Some tools keep an empty object under the name of a folder.
        is_folder = not info.is_file or (info.size == 0 and bool(self.ask(lambda store: store.sizes(self.key))))
        mode = stat.S_IFDIR if is_folder else stat.S_IFREG
        return os.stat_result((mode, 0, 0, 0, 0, 0, info.size or 0, 0, 0, 0))

    def iterdir(self) -> Iterator[StorePath]:
        """Yield the entries of a folder."""
        yield from (self / name for name in self.ask(lambda store: store.entries(self.key, recursive=False)))

    def files(self) -> dict[str, int]:
        """Return the sizes of all files below a folder, by their names in it."""
        return self.ask(lambda store: store.sizes(self.key))

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Return the content of a small file."""
        with self.open_ranges()[0] as file:
            return io.BytesIO(self.read(file, 0, min(file.size(), _LARGEST)))

    def open_ranges(self) -> tuple[pyarrow.NativeFile, int]:
        """Return the file for reading by position, and its tag; raise a FileNotFoundError if there is none."""
        opened = self.ask(lambda store: store.open(self.key))
        if opened is None:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        return opened

    def tag(self) -> int:
        """Return the tag of the file's version (`Store.open`); 0 if there is none."""
        opened = self.ask(lambda store: store.open(self.key))
        return 0 if opened is None else opened[1]

    def read(self, file: pyarrow.NativeFile, begin: int, size: int) -> bytes:
        """Return some bytes of the opened file."""
        return self.ask(lambda store: store.read_at(self.key, file, begin, size))

    def ask(self, action: Callable[[Store], T], tries: int = TRIES_OF_PATH) -> T:
        """Call the store, and repeat a call that fails, as `Store.retry` does."""
        store = _store(Address(self._bucket, "", self.query).text)
        return store.retry(lambda: action(store), threading.Event(), tries)


_store = cache(Store)


def location(path: str) -> Location:
    """Return the place that a user names: on a disk, also for file://, or in a store."""
    if not is_address(path):
        return Path(path).expanduser()
    place = parse_address(path)
    return Path(f"/{place.path}") if place.is_on_disk else StorePath(*place)


def text_of(place: Location) -> str:
    """Return the path or address that `location` reads."""
    return place.address if isinstance(place, StorePath) else str(place)


def _connect(place: Address) -> tuple[pyarrow.fs.FileSystem, str]:
    """Return the file system of an address, and the path in it."""
    scheme, _, bucket = place.bucket.partition("://")
    if place.is_on_disk:
        return pyarrow.fs.LocalFileSystem(), f"/{place.path}".rstrip("/")
    if scheme != "s3":
        system, bucket = pyarrow.fs.FileSystem.from_uri(place._replace(path="").text)
    else:
        parameters = place.parameters
        if not parameters.keys() & {"region", "endpoint_override"}:
            parameters["region"] = _region_of(bucket)
        # By default, a stream of a slow store buffers whole files, and a request times out after three seconds.
        system = pyarrow.fs.S3FileSystem(background_writes=False, connect_timeout=10, request_timeout=60, **parameters)
    return system, f"{bucket.rstrip('/')}/{place.path}".rstrip("/")


_region_of = cache(pyarrow.fs.resolve_s3_region)


def exit_without_waiting() -> None:
    """Let this process exit while a call of a store hangs, which pyarrow's exit handler would wait for."""
    atexit.unregister(pyarrow.fs.ensure_s3_finalized)
