"""The index files of a dataset: which one is of the files as they are now, and how a new one is written.

    listing, settings --> names of possible indices --times of change, else records of content--> the valid index

A listing has an index file per content of its files. The times of change that were seen with a content are noted beside
its index, so that the files are read again only after a change. One process of a job decides, and broadcasts the
content in its listing. An index of an earlier version has no record of content, and is valid for its listing.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import IO

import numpy as np

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import DataConfig
from pretraining.data.storage.content import content_record, open_ranges
from pretraining.data.storage.dataset_files import DatasetFiles, describe_changes, index_folders
from pretraining.data.storage.index import Index, index_digest
from pretraining.data.storage.token_format import DocumentLayout, TokenFormat, load_format
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import reason_of
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of, format_bytes

log = logging.getLogger(__name__)

Record = Callable[[int], int | None]
"""Returns the record of the content of a file by its number, as it is now."""
_MOST_THREADS = 32


def index_name(files: DatasetFiles, config: DataConfig, content: str) -> str:
    """Return the name of the index of a listing with a record of content; "" = an index of an earlier version."""
    # Each listing and content has its own file, so no job replaces an index that a running job has mapped.
    suffix = f"-{content}" if content else ""
    return f"{index_digest(files, config)}-{files.digest[:16]}{suffix}.index"


def find_index(files: DatasetFiles, config: DataConfig, workers: int | None = None) -> Index | None:
    """Open the valid index of a dataset; None without any.

    If `files.content` is not known, files with a new time of change are read, by at most `workers` threads.

    Raises:
        DataError: such a file is unusable.
    """
    known = _files_by_age(files, config, index_name(files, config, files.content or ""))
    if files.content is not None:  # one process of the job has decided
        return next(filter(None, map(open_any_index, known)), None)
    record = cache(partial(_record_now, files, config, load_format(files.file_type, config)))
    threads = workers or min(_MOST_THREADS, usable_cores())
    for path in [*known, *_files_by_age(files, config, index_name(files, config, "*"))]:
        index = open_any_index(path)
        if index is None:
            log.warning("index %s is damaged: it is not used", path)
        elif _is_current(index, files, config, record, threads):
            return index
    return None


def _files_by_age(files: DatasetFiles, config: DataConfig, pattern: str) -> list[Path]:
    """Return the index files with names of a pattern, the newest first."""
    found = (path for folder in index_folders(files, config) for path in folder.glob(pattern))
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def open_any_index(path: Path) -> Index | None:
    """Open the index at a path; None if it is missing or damaged."""
    try:
        return Index(path)
    except (OSError, DataError, ValueError, KeyError, TypeError):
        return None


def recorded_indices(files: DatasetFiles, config: DataConfig) -> list[Index]:
    """Return the indices of a listing that have comparable records of content, of any other settings, newest first."""
    indices = filter(None, map(open_any_index, _files_by_age(files, config, f"*-{files.digest[:16]}-*.index")))
    return [index for index in indices if index.header["read_as"] == read_as(files, config)]


def read_as(files: DatasetFiles, config: DataConfig) -> str:
    """Return the settings that records of content depend on."""
    return f"{files.file_type} {config.col_name}"


def changes_since(files: DatasetFiles, config: DataConfig, records: Sequence[int]) -> str:
    """Return how the files, with these records of content, differ from those of the newest index; empty without one."""
    indices = map(open_any_index, _files_by_age(files, config, f"{index_digest(files, config)}-*.index"))
    older = next(filter(None, indices), None)
    if older is None:
        return ""
    before, after = older.file_sizes, dict(zip(files.paths, files.sizes, strict=True))
    known = dict(zip(before, older.records.tolist(), strict=True)) if older.content else {}
    now = zip(files.paths, records, strict=True)
    return describe_changes(before, after, [name for name, record in now if known.get(name, record) != record])


# Content


def read_documents(files: DatasetFiles, token_format: TokenFormat, number: int) -> tuple[DocumentLayout, int]:
    """Return the documents of a file, and the record of its content; raise a DataError if it is unusable."""
    path = files.path(number)
    with plugin_errors("file_type", files.file_type):
        layout = token_format.documents(path)
    try:
        with open_ranges(path) as read:
            return layout, content_record(read, 0, files.sizes[number], layout)
    except OSError as error:
        raise DataError(f"cannot be read: {reason_of(error)}", path=path) from error


def _is_current(index: Index, files: DatasetFiles, config: DataConfig, record: Record, workers: int) -> bool:
    """Return whether an index is of the content that the files have now; note their times if it is."""
    if not index.content:
        return True
    times = np.array(files.times, dtype="<i8")
    paths = [(folder / index.path.name).with_suffix(".times") for folder in index_folders(files, config)]
    notes = [note for note in map(_read_note, paths) if len(note) == len(times)]
    stale = min((np.flatnonzero(note != times) for note in notes), key=len, default=np.arange(len(times))).tolist()
    if not stale:
        return True
    size = format_bytes(sum(files.sizes[number] for number in stale))
    log.info("dataset '%s': looking for changes in %s (%s)", files.name, count_of(len(stale), "file"), size)
    now = zip(map_in_order(record, stale, workers), index.records[stale].tolist(), strict=True)
    if any(found not in (None, before) for found, before in now):
        return False
    note_times(index.path.name, files, config)
    return True


def _record_now(files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int) -> int | None:
    """Return the record of a file's content; None if it is unusable and in quarantine: its samples are found later."""
    try:
        return read_documents(files, token_format, number)[1]
    except DataError as error:
        if config.bad_documents == "stop":
            raise
        log.warning("%s", error)
        return None


def note_times(name: str, files: DatasetFiles, config: DataConfig) -> None:
    """Note the times of change of files that have the content of the index with this name, if a folder is writable."""

    def write(file: IO[bytes]) -> str:
        file.write(np.array(files.times, dtype="<i8").tobytes())
        return Path(name).with_suffix(".times").name

    with suppress(DataError):  # then the next start looks at the files again
        write_once(index_folders(files, config), "the times of change", write, lambda path: False)


def _read_note(path: Path) -> np.ndarray:
    """Return noted times of change, [files] int64; empty if there are none. A damaged note makes the files be read."""
    try:
        return np.fromfile(path, dtype="<i8")
    except OSError:
        return np.zeros(0, dtype="<i8")


# Writing


def write_once(
    folders: Sequence[Path], what: str, write: Callable[[IO[bytes]], str], is_valid: Callable[[Path], bool]
) -> Path:
    """Write a file atomically to the first writable of several folders, and return its path.

    Args:
        what: the file, for messages: "the index of dataset 'web'".
        write: writes the file, and returns its name.
        is_valid: whether there is a valid file at the path, which stays; it is called after `write`.

    Raises:
        DataError: no folder is writable, or the disk is full.
    """
    refused = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
            break
        except OSError as error:
            refused.append(f"{folder} ({error.strerror})")
    else:
        raise DataError(f"{what} cannot be written: {'; '.join(refused)}. Give --index_path")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            path = folder / write(file)
            file.flush()
            os.fsync(file.fileno())
        # Keep a file that another job has written meanwhile: it may be mapped on another machine.
        if not is_valid(path):
            Path(temporary).chmod(0o644)  # temporary files are private
            Path(temporary).replace(path)
    except OSError as error:
        raise DataError(f"{what} cannot be written: {reason_of(error)}", path=folder) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
