"""The one way to write a file or a folder, complete or not at all, and durable; and to read what others have written.

    content -> .<name>.tmp beside its place -> fsync -> rename -> fsync of the folder

A reader, and a process that starts after a kill or a power failure, sees the old content or the new one, never a part.
Where a file system stumbles for a moment, `with_retries` tries again.

What lies there may come from anywhere. `is_file`, `is_folder`, `exists` and `entries_of` answer, or raise an error for
users; `check_regular` refuses pipes and devices, whose reading may never end; `read_json` bounds size and depth.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pretraining.errors import CheckpointError, DataError, PathError, PretrainError

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
CHECKSUM = "checksum"
NO_FILE = "it is no regular file"
CHECKSUM_BYTES = 2**20  # read at once for a checksum: fits a core's cache

TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY}
"""I/O error, stale handle of a network file system, no answer, busy: gone a second later, perhaps. A full disk, missing
permission and a missing file are not among them: the next try would meet them again."""

_NOTHING_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Of a path that leads nowhere: a link in a circle, and a name that no file can have, too."""

ADDRESS_QUERY = ("region", "scheme", "endpoint_override")
"""What may follow the question mark in the address of an object store."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
LARGEST_JSON_BYTES = 2**25
"""Twice what `prepare` writes about 100,000 files. With the next two it bounds parsing to about a second."""
MOST_IN_JSON = 2**20
"""Objects and lists."""
DEEPEST_JSON = 64
"""Objects and lists inside each other."""
_LARGEST_FILE_BYTES = 2**30  # of those that are read as a whole
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


# Looking


def is_folder(path: Path) -> bool:
    """Return whether a path leads to a folder; a PathError where nobody can tell, as in a folder of another user."""
    status = _status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: Path) -> bool:
    """Return whether a path leads to a regular file; a PathError where nobody can tell."""
    status = _status(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def real_path(path: Path) -> Path:
    """Return a path with its links followed, as far as that goes: `Path.resolve` fails where they lead in a circle."""
    return Path(os.path.realpath(path))


def exists(path: Path) -> bool:
    """Return whether a path leads to anything; a PathError where nobody can tell."""
    return _status(path) is not None


def entries_of(folder: Path) -> list[Path]:
    """Return what is in a folder, in the file system's order; a PathError where it cannot be listed."""
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise path_error(error, folder) from None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except ValueError:  # a null character: no name of a file
        return None
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise path_error(error, path) from None


def path_error(error: OSError, path: Path | str | None = None) -> PathError:
    """Make the error for users of one of the file system that nobody knows more about; it has a file name."""
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    return PathError(
        f"cannot be used: {reason_of(error)}. Check the path and its permissions, or give another one", path=place
    )


def reason_of(error: OSError) -> str:
    """Return why, in the system's words."""
    return error.strerror or str(error)


def check_regular(path: Path | str) -> None:
    """Raise an OSError where a path leads to anything but a file; call it before one that others have made is opened.

    Opening a pipe waits until somebody writes, and some devices have no end.
    """
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NO_FILE, str(path))


def check_replaceable(path: Path, beginning: bytes = b"") -> None:
    """Raise an OSError where writing a path would replace something else than an earlier file of the same kind.

    Args:
        beginning: of files that may be replaced.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EEXIST, NO_FILE, str(path))
    with path.open("rb") as file:
        if file.read(len(beginning)) != beginning:
            raise OSError(errno.EEXIST, "it is a file that holds something else", str(path))


def read_file(path: Path, largest_bytes: int = _LARGEST_FILE_BYTES) -> bytes:
    """Read a file as a whole; an error that may pass is tried again.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is larger than such files are.
    """
    check_regular(path)

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(largest_bytes + 1)

    content = with_retries(read, f"reading {path}")
    if len(content) > largest_bytes:
        raise ValueError(f"it has more than {largest_bytes:,} bytes")
    return content


def from_hub(name: str | Path, files: Sequence[str], problem: type[PretrainError]) -> Path:
    """Return the path that a user named if it is local, else the fetched model of this name on the Hugging Face Hub.

    Args:
        files: patterns of the files to fetch.
        problem: raised if the name could be a model's and the Hub does not give it.
    """
    path = Path(name).expanduser()
    is_local = exists(path) or (path.parent != Path() and exists(path.parent)) or path.suffix == ".json"
    if is_local or not _HUB_NAME.fullmatch(str(name)):
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=list(files)))
    except Exception as error:  # of the library, of its HTTP client, or that it is not installed
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise problem(
            f"there is no {path.absolute()}, and the Hugging Face Hub does not give {name} ({reason}). If the Hub has "
            f"it: `hf download {name} --local-dir={name}` where the Hub can be reached, then the same command again"
        ) from error


def is_address(path: str | None) -> bool:
    """Return whether a path is the address of an object store, such as s3://bucket/runs/mine."""
    return path is not None and "://" in path


def address_problem(address: str) -> str | None:
    """Return why an address is not used; it must hold no credentials, since logs and config.yaml show it."""
    parts = urlsplit(address)
    query = parse_qsl(parts.query, keep_blank_values=True)
    is_open = all(name in ADDRESS_QUERY and "@" not in value for name, value in query)
    if is_open and parts.password is None and not (parts.scheme in ("s3", "gs") and "@" in parts.netloc):
        return None
    return (
        f"holds more than a place: behind it only {', '.join(ADDRESS_QUERY)} may stand, and credentials come from the "
        "environment (docs/checkpoints.md)"
    )


def read_json(path: Path) -> Any:
    """Read a JSON file that may come from anywhere; raises as `read_file` and `parse_json`."""
    return parse_json(read_file(path, LARGEST_JSON_BYTES))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or damaged, or holds something else."""
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Parse JSON that may come from anywhere.

    Args:
        content: text, or text in UTF-8.
        hooks: as `json.loads` takes them.

    Raises:
        ValueError: it is no JSON, larger or nested deeper than anything that is written here, or holds what is no text.
    """
    text = content.decode().removeprefix("\ufeff") if isinstance(content, bytes) else content
    if text.count("[") + text.count("{") > MOST_IN_JSON:  # those in strings, too: a bound, no count
        raise ValueError(f"it has more than {MOST_IN_JSON:,} lists and objects")
    try:
        document = json.loads(text, **hooks)
        _check_depth(document)
    except RecursionError:
        raise ValueError(f"lists and objects are nested more than {DEEPEST_JSON} deep") from None
    if _HALF_OF_A_PAIR.search(text):
        _check_is_text(document)
    return document


def _check_depth(document: Any) -> None:
    """Raise a RecursionError before another part of the program does."""
    level = [document]
    for _ in range(DEEPEST_JSON):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise RecursionError


def _check_is_text(document: Any) -> None:
    """Refuse half of a surrogate pair, which JSON can spell, unless it stands for a byte of a file's name in Python."""
    try:
        json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text") from None


# Writing


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that appears complete or not at all, and survives a power failure.

    A path has one writer at a time; what a killed one leaves, the next one replaces. After an error, what was there
    before is untouched.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_flushed(temporary, content)
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_flushed(path: Path, content: str | bytes) -> None:
    """Write a file in place and flushes it to disk: for folders that are renamed as a whole once they are complete."""
    with path.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def file_checksum(path: Path) -> tuple[str, int]:
    """Return the CRC-32 of a file's bytes, eight hexadecimal digits, and the number of bytes."""
    check_regular(path)
    checksum = size = 0
    buffer = memoryview(bytearray(CHECKSUM_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum, size = zlib.crc32(buffer[:count], checksum), size + count
    return f"{checksum:08x}", size


def link_atomic(link: Path, target: str) -> None:
    """Make a symbolic link that replaces one of the same name at once; an error leaves that one as it was."""
    temporary = link.with_name(f".{link.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
    flush_folder(link.parent)


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file in place, flushed to disk."""
    write_flushed(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with their CRC-32 as one more, by which `checked_values` finds a flipped bit."""
    return {**values, CHECKSUM: _checksum_of(values)}


def checked_values(document: Any) -> dict[str, Any]:
    """Return the values of a JSON object without their checksum; files of earlier versions have none.

    Raises:
        ValueError: it is no object, or its values are not those that the checksum is of.
    """
    if not isinstance(document, dict):
        raise ValueError("no JSON object")
    values = {name: value for name, value in document.items() if name != CHECKSUM}
    if CHECKSUM in document and document[CHECKSUM] != _checksum_of(values):
        raise ValueError("the content does not have the checksum that stands in it")
    return values


def _checksum_of(values: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on disk only once the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with_retries(lambda: os.fsync(descriptor), f"flushing {folder}")
    finally:
        os.close(descriptor)


@contextmanager
def atomic_folder(folder: Path, flag: str, needed_bytes: int) -> Iterator[Path]:
    """Give a folder to write into, which takes the name `folder` when the block ends without an error.

    Args:
        folder: the name; nothing but an empty folder may be there.
        flag: how the user gave it, for messages.
        needed_bytes: about how much will be written.

    Raises:
        CheckpointError: it is no name, something is there already, or it cannot be written; then nothing is left
            behind.
    """
    if folder.name in ("", ".."):
        raise CheckpointError(f"{flag}={folder} is no name for a new folder: give one")
    temporary = folder.with_name(f".{folder.name}.partial")
    try:
        if exists(folder) and (not is_folder(folder) or entries_of(folder)):
            raise CheckpointError(f"it is there already. Remove it, or give another {flag}", path=folder)
        if exists(temporary):  # of a process that was killed
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < needed_bytes:
            raise CheckpointError(
                f"it would take {needed_bytes:,} bytes, and {free:,} are free there. Make room, or give another {flag}",
                path=folder,
            )
        yield temporary
        flush_folder(temporary)
        if exists(folder):
            folder.rmdir()
        temporary.rename(folder)
        flush_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written ({reason_of(error)}); it takes {needed_bytes:,} bytes. Check space and permissions "
            f"there, or give another {flag}",
            path=folder,
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing_into(run: Path) -> Iterator[None]:
    """Turn what the file system says about writing into a run's folder into an error for users."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be written: {error}. Give a --ckpt_save_path that this user may write.", path=run
        ) from None


@contextmanager
def output_errors(root: Path) -> Iterator[None]:
    """Turn what the file system says about --output_path into an error for users; the input's errors say their own."""
    try:
        yield
    except BrokenPipeError:  # of a reader of what is shown, not of a file
        raise
    except OSError as error:
        raise DataError(
            f"cannot be written: {reason_of(error)}. Make room, give write permission or give another --output_path",
            path=error.filename or root,
        ) from error


def with_retries(action: Callable[[], T], what: str) -> T:
    """Do something to files, and again after a pause where it fails with an error that may pass.

    Args:
        action: starts from the beginning each time.
        what: for the warning that it is tried again: "writing /a/b".

    Raises:
        OSError: of the last try, or one that does not pass.
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
