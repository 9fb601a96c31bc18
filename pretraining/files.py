"""Atomic, durable writes of files and folders, and safe reads of untrusted files.

    content -> .<name>.tmp in the same folder -> fsync -> rename -> fsync of the folder

A reader, also after a kill or a power failure, sees the old or the new content, never a part. `with_retries` repeats an
action after an error of the file system that may pass.

Files to read may come from anywhere. `is_file`, `is_folder`, `exists` and `entries_of` return an answer or raise an
error for users; `check_regular` refuses pipes and devices, which may block forever; `read_json` limits size and depth.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import parse_qsl, quote, unquote

from pretraining.errors import CheckpointError, DataError, PathError, PretrainError

log = logging.getLogger(__name__)

T = TypeVar("T")
AnyLocation = TypeVar("AnyLocation", bound="Location")

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
CHECKSUM = "checksum"
NO_FILE = "it is not a regular file"
CHECKSUM_BYTES = 2**20  # per read for a checksum; fits a core's cache

TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
"""Errors that may pass: I/O error, stale handle of a network file system, timeout, busy. A full disk, a missing
permission or a missing file would fail again."""

_NOT_FOUND = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a path that leads to no file, including circular links and impossible names."""

_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of an operation that a file system does not have."""
ADDRESS_QUERY = ("region", "scheme", "endpoint_override")
"""Parameters allowed after the question mark of an object store address."""
_PARAMETERS = re.compile(r"\Z|[\w-]+=")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
LARGEST_JSON_BYTES = 2**25
"""Twice the size of a prepare.json about 100,000 files. This limit and the next two keep parsing to about a second."""
MOST_IN_JSON = 2**20
"""Objects and lists."""
DEEPEST_JSON = 64
"""Nesting depth of objects and lists."""
_LARGEST_FILE_BYTES = 2**30  # limit for reading a file into memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a file that Git LFS left in place of another one."""
LFS_REMEDY = "Run `git lfs pull` in its repository to fetch the file itself"


class Location(Protocol):
    """A path on a disk, or in an object store (`object_store.StorePath`)."""

    @property
    def name(self) -> str:
        """Last part."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All parts."""

    @property
    def parent(self) -> Self:
        """The folder that holds the path."""

    def __truediv__(self, name: str, /) -> Self:
        """Return a path in this folder."""

    def with_suffix(self, suffix: str) -> Self:
        """Return the path with another suffix."""

    def absolute(self) -> Self:
        """Return the absolute path."""

    def stat(self) -> os.stat_result:
        """Return kind and size; raise an OSError if there is nothing."""

    def iterdir(self) -> Iterator[Self]:
        """Yield the entries of a folder."""

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """Open a small file."""


# Reading


def is_folder(path: Location) -> bool:
    """Return whether a path is a folder; a PathError if permissions do not allow to tell."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: Location) -> bool:
    """Return whether a path is a regular file; a PathError if permissions do not allow to tell."""
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def real_path(path: Path) -> Path:
    """Return a path with links resolved as far as possible; `Path.resolve` would fail on circular links."""
    return Path(os.path.realpath(path))


def exists(path: Location) -> bool:
    """Return whether a path exists; a PathError if permissions do not allow to tell."""
    return _status(path) is not None


def entries_of(folder: AnyLocation) -> list[AnyLocation]:
    """Return the entries of a folder, in the file system's order; a PathError if they cannot be listed."""
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise path_error(error, folder) from None


def _status(path: Location) -> os.stat_result | None:
    try:
        return path.stat()
    except ValueError:  # the path contains a null character
        return None
    except OSError as error:
        if error.errno in _NOT_FOUND:
            return None
        raise path_error(error, path) from None


def path_error(error: OSError, path: Location | str | None = None) -> PathError:
    """Convert an OSError into an error for users; the path is the error's own, if it has one."""
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    return PathError(
        f"cannot be used: {reason_of(error)}. Check the path and its permissions, or give another one", path=place
    )


def reason_of(error: OSError) -> str:
    """Return the system's message."""
    return error.strerror or str(error)


def check_regular(path: Location | str) -> None:
    """Raise an OSError unless a path is a regular file; call it before opening untrusted files.

    Opening a pipe blocks until another process writes, and some devices are endless.
    """
    mode = (Path(path) if isinstance(path, str) else path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NO_FILE, str(path))


def check_replaceable(path: Path, beginning: bytes = b"") -> None:
    """Raise an OSError unless a path is free or holds a file that begins with these bytes."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, NO_FILE, str(path))
    with path.open("rb") as file:
        if file.read(len(beginning)) != beginning:
            raise OSError(errno.EEXIST, "a file with other content exists", str(path))


def lfs_pointer_hint(path: Location) -> str:
    """Return the problem and the remedy of a file that is a Git LFS pointer, for its error; empty for other files."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return ""
    return f"it is a Git LFS pointer. {LFS_REMEDY}" if is_pointer else ""


def read_file(path: Location, largest_bytes: int = _LARGEST_FILE_BYTES) -> bytes:
    """Read a whole file, with retries.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is too large.
    """
    check_regular(path)

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(largest_bytes + 1)

    content = with_retries(read, f"reading {path}")
    if len(content) > largest_bytes:
        raise ValueError(f"it has more than {largest_bytes:,} bytes")
    return content


def check_inside(folder: Location, name: str, problem: type[PretrainError]) -> None:
    """Raise a `problem` if links lead a file of a stranger's folder out of it, such as to a private file.

    The Hub's cache keeps the files of all revisions of a model in `blobs`, with links to them.
    """
    if not isinstance(folder, Path):  # a store has no links
        return
    home, real = real_path(folder), real_path(folder / name)
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(each) for each in homes):
        raise problem(f"leads out of its folder, to {real}. Put the file itself there", path=folder / name)


def from_hub(name: str | Path, files: Sequence[str], problem: type[PretrainError]) -> Path:
    """Return a local path; download a model from the Hugging Face Hub if no such path exists and the name may be one.

    Args:
        name: local path, or name of a model on the Hub.
        files: patterns of the files to download.
        problem: type of the error if the Hub does not have the model or cannot be reached.
    """
    path = Path(name).expanduser()
    is_local = exists(path) or (path.parent != Path() and exists(path.parent)) or path.suffix == ".json"
    if is_local or not _HUB_NAME.fullmatch(str(name)):
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except Exception as error:  # of the library or its HTTP client, or the library is not installed
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise problem(
            f"there is no {path.absolute()}, and the Hugging Face Hub does not give {name} ({reason}). If the Hub has "
            f"it, run `hf download {name} --local-dir={name}` where the Hub can be reached, then this command again"
        ) from error


def is_local(path: str) -> bool:
    """Return whether a text can only be a path on a disk: no address, and no name on the Hub."""
    return not is_address(path) and _HUB_NAME.fullmatch(path) is None


def as_local(path: str) -> str:
    """Return a path that exists as a text that is no name on the Hub, `./data` for `data`; other texts as they are."""
    return f"./{path}" if _HUB_NAME.fullmatch(path) and exists(Path(path)) else path


def is_address(path: str | None) -> bool:
    """Return whether a path is an object store address, such as s3://bucket/runs/mine."""
    return path is not None and "://" in path


class Address(NamedTuple):
    """Parts of the address of a place in an object store or, with file://, on a disk.

    Attributes:
        bucket: with its scheme, such as s3://bucket; with file:// the host.
        path: in the bucket, without empty parts.
        query: parameters, such as region=eu-west-1; or empty.
    """

    bucket: str
    path: str
    query: str

    @property
    def place(self) -> str:
        """The address without its query, for messages."""
        return f"{self.bucket}/{self.path}".rstrip("/")

    @property
    def is_on_disk(self) -> bool:
        """Whether it is an address with file://."""
        return self.bucket.startswith("file://")

    @property
    def text(self) -> str:
        """The address, of which `parse_address` returns these parts."""
        if self.is_on_disk:
            return self.place.replace("%", "%25")
        return self.place + (f"?{self.query}" if self.query or "?" in self.path else "")

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters by name."""
        return dict(parse_qsl(self.query, keep_blank_values=True))


def parse_address(text: str) -> Address:
    """Take an address apart.

    Every character of a path stands for itself, as in the stores' own tools; file:// alone is percent-encoded. A query
    begins at the last question mark, if that is the last character or name=value follows. An s3:// address without an
    endpoint gets that of the environment, as boto reads it.
    """
    scheme, _, place = text.partition("://")
    scheme, query = scheme.lower(), ""
    before, mark, after = place.rpartition("?")
    if mark and scheme != "file" and _PARAMETERS.match(after):
        place, query = before, after
    bucket, _, path = place.partition("/")
    if scheme == "file":
        path = unquote(path, errors="surrogateescape")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint and "endpoint_override" not in dict(parse_qsl(query)):
        query = f"{query}&endpoint_override={quote(endpoint, safe=':/')}".lstrip("&")
    return Address(f"{scheme}://{bucket}", join_names(path), query)


def join_names(*names: str) -> str:
    """Join names of a path in a store as `Path` does: without empty parts and single dots."""
    return "/".join(part for part in "/".join(names).split("/") if part not in ("", "."))


def address_problem(address: str) -> str | None:
    """Return the problem of an address, or None. Credentials are refused: logs and config.yaml show addresses."""
    place = parse_address(address)
    scheme, _, host = place.bucket.partition("://")
    user, at, _ = host.rpartition("@")
    if place.is_on_disk and host not in ("", "localhost"):
        return f"names the host {host}: a path on a disk has three slashes, file:///{host}"
    if not place.is_on_disk and ".." in place.path.split("/"):
        return "has the part '..', which a store takes as a name: write the path without it"
    is_open = all(name in ADDRESS_QUERY and "@" not in value for name, value in place.parameters.items())
    if is_open and ":" not in user and not (at and scheme in ("s3", "gs")):
        return None
    return (
        f"has other parameters than {', '.join(ADDRESS_QUERY)}, or credentials: credentials come from the environment "
        "(docs/checkpoints.md)"
    )


def read_json(path: Location) -> Any:
    """Read an untrusted JSON file; raises as `read_file` and `parse_json`."""
    return parse_json(read_file(path, LARGEST_JSON_BYTES))


def read_object(path: Location) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged, or holds something else.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        document = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Parse untrusted JSON.

    Args:
        content: text, or UTF-8.
        hooks: arguments of `json.loads`.

    Raises:
        ValueError: the content is malformed, too large, nested too deep, or has strings that are not Unicode.
    """
    text = content.decode().removeprefix("\ufeff") if isinstance(content, bytes) else content
    if text.count("[") + text.count("{") > MOST_IN_JSON:  # an upper bound: brackets in strings count, too
        raise ValueError(f"it has more than {MOST_IN_JSON:,} lists and objects")
    try:
        document = json.loads(text, **hooks)
        is_too_deep = _depth_of(document) > DEEPEST_JSON
    except RecursionError:
        is_too_deep = True
    if is_too_deep:  # later code would fail on it
        raise ValueError(f"lists and objects are nested more than {DEEPEST_JSON} deep")
    if _SURROGATE.search(text):  # half of a pair is an error, except as Python writes the bytes of file names
        json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")
    return document


def _depth_of(document: Any) -> int:
    """Return how deep objects and lists are nested; raise a RecursionError beyond Python's own limit."""
    if not isinstance(document, (dict, list)):
        return 0
    children = document.values() if isinstance(document, dict) else document
    return 1 + max((_depth_of(child) for child in children if isinstance(child, (dict, list))), default=0)


# Writing


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically and durably.

    A path has one writer at a time. The next writer replaces a killed one's temporary file. An error leaves the old
    file unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_flushed(temporary, content)
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_flushed(path: Path, content: str | bytes) -> None:
    """Write a file in place and flush it to disk, for folders that are renamed once complete."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def file_checksum(path: Path) -> tuple[str, int]:
    """Return the CRC-32 of a file, as eight hexadecimal digits, and its size in bytes."""
    check_regular(path)
    checksum = size = 0
    buffer = memoryview(bytearray(CHECKSUM_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return f"{checksum:08x}", size


def link_atomic(link: Path, target: str) -> None:
    """Create or replace a symbolic link atomically; an error leaves the old link unchanged."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    flush_folder(link.parent)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file in place, flushed to disk."""
    write_flushed(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with their CRC-32 added, by which `checked_values` detects a flipped bit."""
    return {**values, CHECKSUM: _checksum_of(values)}


def checked_values(document: Any) -> dict[str, Any]:
    """Return the values of a JSON object without their checksum.

    Raises:
        ValueError: the document is not an object, or the checksum is missing or does not match.
    """
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    values = {name: value for name, value in document.items() if name != CHECKSUM}
    if document.get(CHECKSUM) != _checksum_of(values):
        raise ValueError("the content does not match its checksum")
    return values


def _checksum_of(values: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on disk only after an fsync of its folder.

    Some network and FUSE file systems cannot do this: they get one warning per process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with_retries(lambda: os.fsync(descriptor), f"flushing {folder}")
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _warn_of_unflushed(os.fstat(descriptor).st_dev, str(folder), reason_of(error))
    finally:
        os.close(descriptor)


_warned_devices: set[int] = set()


def _warn_of_unflushed(device: int, folder: str, reason: str) -> None:
    if device not in _warned_devices:
        _warned_devices.add(device)
        log.warning(
            "%s: this file system cannot flush folders (%s). Checkpoints are safe from kills, but a power failure of "
            "the server may lose the newest",
            folder,
            reason,
        )


@contextmanager
def atomic_folder(folder: Path, flag: str, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder to write into, which is renamed to `folder` if the block raises no error.

    Args:
        folder: path that does not exist, or is an empty folder.
        flag: the user's flag, for messages.
        needed_bytes: approximate size of the content.

    Raises:
        CheckpointError: the path exists or cannot be written; the temporary folder is removed.
    """
    if folder.name in ("", ".."):
        raise CheckpointError(f"{flag}={folder} cannot name a new folder: give another path")
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        with output_errors(folder, flag, problem=CheckpointError, needed_bytes=needed_bytes):
            if exists(folder) and (not is_folder(folder) or entries_of(folder)):
                raise CheckpointError(f"it exists already. Remove it, or give another {flag}", path=folder)
            if exists(temporary):  # left by a killed process
                shutil.rmtree(temporary)
            temporary.mkdir(parents=True)
            free = shutil.disk_usage(temporary).free
            if free < needed_bytes:
                raise CheckpointError(
                    f"it needs {needed_bytes:,} bytes, but {free:,} are free there. Make room, or give another {flag}",
                    path=folder,
                )
            yield temporary
            flush_folder(temporary)
            if exists(folder):
                folder.rmdir()
            temporary.rename(folder)
            flush_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def writing_into(run: Path, needed_bytes: int = 0) -> AbstractContextManager[None]:
    """Convert an OSError from writing into a run folder into an error for users."""
    return output_errors(run, "--ckpt_save_path", problem=CheckpointError, needed_bytes=needed_bytes)


@contextmanager
def output_errors(
    root: Path,
    flag: str = "--output_path",
    name_flag: str = "",
    problem: type[PretrainError] = DataError,
    needed_bytes: int = 0,
) -> Iterator[None]:
    """Convert an OSError from writing to the folder of a flag into an error for users.

    Args:
        name_flag: flag that makes the names of files and folders in it shorter; "" = `flag`.
        problem: type of the error.
        needed_bytes: size of all that is written; 0 = not known.
    """
    try:
        yield
    except BrokenPipeError:  # of stdout, not of a file
        raise
    except OSError as error:
        reason, remedy = reason_of(error), f"Make room, give write permission or give another {flag}"
        if error.errno == errno.ENAMETOOLONG:
            remedy = f"Give a shorter {name_flag or flag}"
        if needed_bytes and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = next(shutil.disk_usage(parent).free for parent in (root, *root.parents) if exists(parent))
            reason += f"; all of it takes {needed_bytes:,} bytes, and {free:,} are free there"
        raise problem(f"cannot be written: {reason}. {remedy}", path=error.filename or root) from error


def with_retries(action: Callable[[], T], what: str) -> T:
    """Run an action on files, and repeat it after a pause if it fails with a `TRANSIENT` error.

    Args:
        action: called again from the beginning on each try.
        what: text for the warning: "writing /a/b".

    Raises:
        OSError: the error of the last try, or an error that is not transient.
    """
    for number, seconds in enumerate(PAUSES_SECONDS, start=1):
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            tries = f"try {number + 1} of {len(PAUSES_SECONDS) + 1} in {seconds:g} s"
            log.warning("%s failed (%s): %s", what, error.strerror, tries)
        time.sleep(seconds)
    return action()
