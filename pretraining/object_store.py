"""Folder in an object store. pyarrow connects to S3, Google Cloud Storage, Azure and disks.

    Store("s3://bucket/runs/mine").read("config.yaml")

Credentials come from the environment. Calls fail with a `StoreError`; `Store.retry` repeats them.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from time import monotonic
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow.fs
from pyarrow.lib import ArrowException

from pretraining.errors import PretrainError
from pretraining.files import address_problem

T = TypeVar("T")

log = logging.getLogger(__name__)

PIECE_BYTES = 2**22
LOG_SECONDS = 60.0
"""Time between two log lines about a failing store."""
LONGEST_PAUSE_SECONDS = 30.0


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
        self.address = address.partition("?")[0].rstrip("/")
        self.problem = ""
        with self._as_store_error(""):
            self._system, self._root = _connect(address)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None if the object does not exist."""
        path = self._path(name)
        with self._as_store_error(name), suppress(FileNotFoundError), self._system.open_input_stream(path) as stream:
            return bytes(stream.read())
        return None

    def read_range(self, name: str, begin: int, size: int) -> bytes:
        """Return some bytes of an object; fewer at its end."""
        with self._as_store_error(name), self._system.open_input_file(self._path(name)) as file:
            return bytes(file.read_at(size, begin))

    def read_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of an object in order."""
        with self._as_store_error(name), self._system.open_input_stream(self._path(name)) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield bytes(piece)

    def size(self, name: str) -> int | None:
        """Return the size of an object; None if the object does not exist."""
        with self._as_store_error(name):
            found: int | None = self._system.get_file_info(self._path(name)).size
            return found

    def sizes(self) -> dict[str, int]:
        """Return the size of every object by its name."""
        selector = pyarrow.fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        with self._as_store_error(""):
            found = self._system.get_file_info(selector)
        files = [info for info in found if info.type == pyarrow.fs.FileType.File]
        return {info.path.removeprefix(self._root).lstrip("/"): info.size for info in files}

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
        written = self.size(name)
        if written != size:
            with self._as_store_error(name):
                raise OSError(f"the object has {written or 0:,} bytes instead of {size:,}")

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with everything in it, if there is one."""
        path = self._path(name)
        with self._as_store_error(name), suppress(FileNotFoundError):
            found = self._system.get_file_info(path).type
            if found == pyarrow.fs.FileType.File:
                self._system.delete_file(path)
            elif found == pyarrow.fs.FileType.Directory:
                self._system.delete_dir(path)

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


def exit_without_waiting() -> None:
    """Let this process exit while a call of a store hangs, which pyarrow's exit handler would wait for."""
    atexit.unregister(pyarrow.fs.ensure_s3_finalized)
