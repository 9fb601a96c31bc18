"""The index files of a dataset: the choice of the one that matches the files, and the building of a new one.

    listing, settings --> names of possible indices --times of change, else records of content--> the valid index
    files --TokenFormat.documents, on threads--> documents --in order--> temporary file --block totals, header--> rename

A listing has an index file per content of its files. A second file notes the times of change that were seen with a
content, so that the files are read again only after a change. One process of a job decides, and broadcasts the
content in its listing.

Several processes may build the same index at once: each writes an equal temporary file, and the first one stays.
Memory does not grow with the dataset.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO

import numpy as np

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import DataConfig
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.storage.content import content_record, digest_of_records
from pretraining.data.storage.dataset_files import DatasetFiles, describe_changes, index_folders
from pretraining.data.storage.document_records import check_version, local_copy, read_record
from pretraining.data.storage.index import (
    BLOCK_DOCUMENTS,
    DOCUMENT,
    FILE,
    HELD_OUT,
    MAGIC,
    SPLITS,
    TRAILER,
    VIRTUAL_BOS,
    VIRTUAL_SEP,
    Index,
    index_digest,
    settings_digest,
    split_lengths,
)
from pretraining.data.storage.token_format import DocumentLayout, TokenFormat, load_format
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import reason_of
from pretraining.launch.machine import usable_cores
from pretraining.object_store import REQUESTS
from pretraining.text import count_of, format_bytes

log = logging.getLogger(__name__)

Record = Callable[[int], int | None]
"""Returns the record of the content of a file by its number, as it is now."""
_MOST_THREADS = 32
_FileDocuments = tuple[np.ndarray, int, int]
"""Documents of a file, [rows] `DOCUMENT`; its bytes per token, negative for signed types; record of its content."""

_BLOCKS_AT_ONCE = 4096
_LARGEST_LENGTH = 2**32 - 3  # lengths have 32 bits and may include two virtual tokens


def index_name(files: DatasetFiles, config: DataConfig, content: str) -> str:
    """Return the name of the index of a listing with a record of content."""
    # Each listing and content has its own file, so no job replaces an index that a running job has mapped.
    return f"{index_digest(files, config)}-{files.digest[:16]}-{content}.index"


def find_index(files: DatasetFiles, config: DataConfig) -> Index | None:
    """Open the valid index of a dataset; None if there is none.

    If `files.content` is not known, files with a new time of change are read.

    Raises:
        DataError: such a file is unusable.
    """
    known = _files_by_age(files, config, index_name(files, config, files.content or "*"))
    if files.content is not None:  # one process of the job has decided
        return next(filter(None, map(open_any_index, known)), None)
    record = cache(partial(_record_now, files, config, load_format(files.file_type, config)))
    for path in known:
        index = open_any_index(path)
        if index is None:
            log.warning("index %s is damaged: it is not used", path)
        elif _is_current(index, files, config, record):
            return index
    return None


def _files_by_age(files: DatasetFiles, config: DataConfig, pattern: str) -> list[Path]:
    """Return the index files with names of a pattern, the newest first."""
    paths = (path for folder in index_folders(files, config) for path in folder.glob(pattern))
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


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
    """Return how the files, with these records of content, differ from the newest index; empty if there is none."""
    indices = map(open_any_index, _files_by_age(files, config, f"{index_digest(files, config)}-*.index"))
    older = next(filter(None, indices), None)
    if older is None:
        return ""
    before, after = older.file_sizes, dict(zip(files.paths, files.sizes, strict=True))
    known = dict(zip(before, older.records.tolist(), strict=True))
    now = zip(files.paths, records, strict=True)
    return describe_changes(before, after, [name for name, record in now if known.get(name, record) != record])


# Content


def read_documents(
    files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int
) -> tuple[DocumentLayout, int]:
    """Return the documents of a file, and the record of its content; raise a DataError if it is unusable."""
    if files.is_remote:
        place, size = files.place(number), files.sizes[number]
        recorded = read_record(place, size, read_as(files, config), config.strip_tokens)
        if recorded is not None:
            check_version(files, number)
            return recorded
    with local_copy(files, number, config.data_cache_path) as path:
        return read_local(files, token_format, number, path)


def read_local(files: DatasetFiles, token_format: TokenFormat, number: int, path: str) -> tuple[DocumentLayout, int]:
    """Return the documents of a file of which a path on a disk is given, and the record of its content."""
    with plugin_errors("file_type", files.file_type):
        layout = token_format.documents(path)
    try:
        return layout, content_record(Path(path), 0, files.sizes[number], layout)
    except OSError as error:
        raise DataError(f"cannot be read: {reason_of(error)}", path=path) from error


def _threads(files: DatasetFiles) -> int:
    """Return the number of threads for all files: on a disk they compute, in a store they wait."""
    return REQUESTS if files.is_remote else min(_MOST_THREADS, usable_cores())


def _is_current(index: Index, files: DatasetFiles, config: DataConfig, record: Record) -> bool:
    """Return whether an index is of the content that the files have now; note their times if it is."""
    times = np.array(files.times, dtype="<i8")
    paths = [(folder / index.path.name).with_suffix(".times") for folder in index_folders(files, config)]
    notes = [note for note in map(_read_note, paths) if len(note) == len(times)]
    stale = min((np.flatnonzero(note != times) for note in notes), key=len, default=np.arange(len(times))).tolist()
    if not stale:
        return True
    size = format_bytes(sum(files.sizes[number] for number in stale))
    log.info("dataset '%s': looking for changes in %s (%s)", files.name, count_of(len(stale), "file"), size)
    now = zip(map_in_order(record, stale, _threads(files)), index.records[stale].tolist(), strict=True)
    if any(record_now not in (None, before) for record_now, before in now):
        return False
    note_times(index.path.name, files, config)
    return True


def _record_now(files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int) -> int | None:
    """Return the record of a file's content; None if it is unusable and in quarantine: its samples are found later."""
    try:
        return read_documents(files, config, token_format, number)[1]
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


# Building


def build_index(files: DatasetFiles, config: DataConfig) -> Index:
    """Return the dataset's index; build it if it is missing or damaged.

    Raises:
        DataError: a file is unusable, or has another content than `files.content`; the index cannot be written.
    """
    index = find_index(files, config)
    if index is not None:
        return index
    size = format_bytes(sum(files.sizes))
    log.info("indexing dataset '%s': %s, %s", files.name, count_of(len(files.paths), "file"), size)

    def write(file: IO[bytes]) -> str:
        read = partial(_read_file, files, config, load_format(files.file_type, config))
        with closing(map_in_order(read, range(len(files.paths)), _threads(files))) as documents_of_files:
            content = _write_index(file, files, config, documents_of_files)
        if files.content not in (None, content):
            raise DataError(
                f"dataset '{files.name}' has other files on this machine than on that of rank 0, of equal names and "
                "sizes: copy them again",
                path=files.folder,
            )
        name = index_name(files, config, content)
        note_times(name, files, config)
        return name

    return Index(_write_index_file(files, config, write))


def receive_index(files: DatasetFiles, config: DataConfig, pieces: Iterable[bytes]) -> None:
    """Write the index that another machine has built, with `files.content`; raise a DataError if that fails."""

    def write(file: IO[bytes]) -> str:
        for piece in pieces:
            file.write(piece)
        return index_name(files, config, files.content or "")

    _write_index_file(files, config, write)


def _write_index_file(files: DatasetFiles, config: DataConfig, write: Callable[[IO[bytes]], str]) -> Path:
    """Write an index with `write_once`."""
    what = f"the index of dataset '{files.name}'"
    return write_once(index_folders(files, config), what, write, lambda path: open_any_index(path) is not None)


def held_out_mask(dataset: str, fraction: float, path: str, rows: int) -> np.ndarray:
    """Return which rows of a file are held out, [rows] bool, by comparing their hashes with the fraction."""
    threshold = int(fraction * 2**64)
    if threshold == 0:
        return np.zeros(rows, dtype=bool)
    key = derive_key(Purpose.HELD_OUT, text_key(dataset, path))
    return hash64(key, np.arange(rows)) < np.uint64(threshold)


def _write_index(
    file: IO[bytes], files: DatasetFiles, config: DataConfig, documents_of_files: Iterable[_FileDocuments]
) -> str:
    """Write an index, and return the record of the content of all files."""
    parts: dict[str, dict[str, int]] = {}

    def write(name: str, content: bytes, count: int) -> None:
        file.write(b"\0" * (-file.tell() % 16))
        parts[name] = {"offset": file.tell(), "count": count}
        file.write(content)

    first_documents: list[int] = [0]
    token_bytes: list[int] = []
    records: list[int] = []
    for documents, width, record in documents_of_files:
        file.write(documents.tobytes())
        first_documents.append(first_documents[-1] + len(documents))
        token_bytes.append(width)
        records.append(record)
    count = first_documents[-1]
    parts["documents"] = {"offset": 0, "count": count}
    file.flush()

    table = np.zeros(len(first_documents), dtype=FILE)
    table["first_document"], table["token_bytes"][:-1] = first_documents, token_bytes
    write("files", table.tobytes(), len(table))
    file.flush()
    bounds, checksums = _summarize_blocks(file, count)
    for split, bounds_of_split in zip(SPLITS, bounds, strict=True):
        write(f"bounds_{split}", bounds_of_split.tobytes(), len(bounds_of_split))
    write("checksums", checksums.tobytes(), len(checksums))
    write("records", np.array(records, dtype="<u8").tobytes(), len(records))
    names = json.dumps(dict(zip(files.paths, files.sizes, strict=True))).encode()
    write("names", names, len(names))
    content, change = digest_of_records(records), changes_since(files, config, records)
    if change:
        log.info("dataset '%s': files changed since it was indexed (%s)", files.name, change)
    header = {
        "settings": settings_digest(files, config),
        "files": files.digest,
        "changes": change,
        "content": content,
        "read_as": read_as(files, config),
        "parts": parts,
    }
    text = json.dumps(header).encode()
    file.write(text)
    file.flush()
    documents_end = count * DOCUMENT.itemsize
    checksum = zlib.crc32(os.pread(file.fileno(), file.tell() - documents_end, documents_end))
    file.write(TRAILER.pack(documents_end, len(text), checksum, MAGIC))
    return content


def _read_file(files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int) -> _FileDocuments:
    """Find the documents of a file; raise a DataError if it is unusable."""
    layout, record = read_documents(files, config, token_format, number)
    too_long = np.flatnonzero(layout.lengths > _LARGEST_LENGTH)
    if len(too_long):
        row = int(too_long[0])
        raise DataError(
            f"a document of {layout.lengths[row]:,} tokens is too long (at most {_LARGEST_LENGTH:,})",
            path=files.path(number),
            row=row,
        )
    documents = documents_as_trained(layout, config)
    held_out = held_out_mask(files.name, config.held_out_fraction, files.paths[number], len(documents))
    documents["flags"][held_out] |= HELD_OUT
    width = -layout.width if layout.tokens.dtype.kind == "i" else layout.width
    return documents, width, record


def _summarize_blocks(file: IO[bytes], count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the tokens before each block, then all, [blocks + 1] per split, and the blocks' checksums."""
    starts = np.arange(0, count, BLOCK_DOCUMENTS * _BLOCKS_AT_ONCE)
    checksums: list[int] = []
    block_bytes = BLOCK_DOCUMENTS * DOCUMENT.itemsize
    totals: list[list[np.ndarray]] = [[np.zeros(1, dtype=np.int64)] for _ in SPLITS]
    for start in starts:
        size = min(BLOCK_DOCUMENTS * _BLOCKS_AT_ONCE, count - int(start))
        raw = os.pread(file.fileno(), size * DOCUMENT.itemsize, int(start) * DOCUMENT.itemsize)
        checksums += [zlib.crc32(raw[at : at + block_bytes]) for at in range(0, len(raw), block_bytes)]
        documents = np.frombuffer(raw, dtype=DOCUMENT)
        for split, held_out in zip(totals, (0, HELD_OUT), strict=True):
            split.append(np.add.reduceat(split_lengths(documents, held_out), np.arange(0, size, BLOCK_DOCUMENTS)))
    bounds = [np.cumsum(np.concatenate(split)).astype("<i8") for split in totals]
    return bounds, np.array(checksums, dtype="<u4")


def documents_as_trained(layout: DocumentLayout, config: DataConfig) -> np.ndarray:
    """Return the documents of a file for the index, [n] `DOCUMENT`, without the flag of the held-out split.

    stored tokens --strip_tokens: removed at both ends--> --min_length: shorter documents become empty--> kept tokens
    kept tokens, if any --bos_token, sep_token: added as virtual tokens if missing--> the document
    """
    tokens, begins = layout.tokens, layout.offsets // layout.width
    begins, ends = _strip(tokens, begins, begins + layout.lengths, config.strip_tokens)
    kept = np.flatnonzero(ends - begins >= config.min_length)
    documents = np.zeros(len(begins), dtype=DOCUMENT)
    documents["offset"], documents["tokens"][kept] = begins * layout.width, (ends - begins)[kept]
    for token, positions, flag in ((config.bos, begins, VIRTUAL_BOS), (config.sep, ends - 1, VIRTUAL_SEP)):
        if token is not None:
            documents["flags"][kept[~np.isin(tokens[positions[kept]], [token])]] |= flag
    return documents


def _strip(
    tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, strip_tokens: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Strip tokens of a set from both ends of every document, and return the new starts and ends in `tokens`."""
    if not strip_tokens:
        return begins, ends
    begins = begins + _run_lengths(tokens, begins, 1, ends - begins, strip_tokens)
    return begins, ends - _run_lengths(tokens, ends - 1, -1, ends - begins, strip_tokens)


def _run_lengths(
    tokens: np.ndarray, firsts: np.ndarray, direction: int, limits: np.ndarray, wanted: Sequence[int]
) -> np.ndarray:
    """Count consecutive wanted tokens from `firsts` in a direction, at most `limits`, [n] int64.

    Each iteration looks one token further, in all documents at once.
    """
    runs = np.zeros(len(firsts), dtype=np.int64)
    active = np.flatnonzero(limits)
    while len(active):
        active = active[np.isin(tokens[firsts[active] + direction * runs[active]], wanted)]
        runs[active] += 1
        active = active[runs[active] < limits[active]]
    return runs
