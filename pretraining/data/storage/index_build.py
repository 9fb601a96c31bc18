"""Making the index of a dataset: all its files are looked at, in parallel, and the result is renamed into place.

    files --TokenFormat.documents, on threads--> documents --in order--> temporary file --block totals, header--> rename

Any number of processes may build the same index at once: each writes its own temporary file, they are all equal, and
the first that is done stays. Memory does not grow with the dataset.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Collection, Iterable
from contextlib import closing
from functools import partial
from typing import IO

import numpy as np

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import DataConfig
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.storage.dataset_files import DatasetFiles, describe_changes
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
    find_index,
    index_digest,
    index_places,
    open_any_index,
    settings_digest,
    split_lengths,
    write_once,
)
from pretraining.data.storage.token_format import DocumentLayout, TokenFormat, load_format
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import exists
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of, format_bytes

log = logging.getLogger(__name__)

_FileDocuments = tuple[np.ndarray, int]
"""The documents of a file, [rows] `DOCUMENT`, and its bytes a token, negative if tokens are of a signed type."""

_BLOCKS_AT_ONCE = 4096
_LARGEST_LENGTH = 2**32 - 3  # a length is 32 bits, and two virtual tokens may come on top


def build_index(files: DatasetFiles, config: DataConfig, workers: int | None = None) -> Index:
    """Return the dataset's index, made first where there is no valid one.

    `workers` are threads that look at files; None = as many as cores, at most 32.

    Raises:
        DataError: a file cannot be used, or there is no place to write the index.
    """
    index = find_index(files, config)
    if index is not None:
        return index
    damaged = next((place for place in index_places(files, config) if exists(place)), None)
    change = _what_changed(files, config)
    if damaged is not None:  # its name is that of these files and settings
        log.warning("index %s is damaged: it is made again", damaged)
    elif change:
        log.info("dataset '%s': files changed since it was indexed (%s)", files.name, change)
    log.info(
        "indexing dataset '%s': %s, %s", files.name, count_of(len(files.paths), "file"), format_bytes(sum(files.sizes))
    )

    def write(file: IO[bytes]) -> None:
        read = partial(_read_file, files, config, load_format(files.file_type, config))
        threads = workers or min(32, usable_cores())
        with closing(map_in_order(read, range(len(files.paths)), threads)) as documents_of_files:
            _write_index(file, files, config, change, documents_of_files)

    find = partial(find_index, files, config)
    return write_once(index_places(files, config), f"the index of dataset '{files.name}'", write, find)


def held_out_mask(dataset: str, fraction: float, path: str, rows: int) -> np.ndarray:
    """Return which rows of a file are held out, [rows] bool: those whose hash is below the fraction."""
    threshold = int(fraction * 2**64)
    if threshold == 0:
        return np.zeros(rows, dtype=bool)
    key = derive_key(Purpose.HELD_OUT, text_key(dataset, path))
    return hash64(key, np.arange(rows)) < np.uint64(threshold)


def _what_changed(files: DatasetFiles, config: DataConfig) -> str:
    """Return which files differ from those of the newest older index at one of the places."""
    for place in index_places(files, config):
        found = place.parent.glob(f"{index_digest(files, config)}-*.index")
        for older_place in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            older = open_any_index(older_place)
            if older is not None:
                return describe_changes(older.file_sizes, dict(zip(files.paths, files.sizes, strict=True)))
    return ""


def _write_index(
    file: IO[bytes], files: DatasetFiles, config: DataConfig, change: str, documents_of_files: Iterable[_FileDocuments]
) -> None:
    """Write a whole index."""
    parts: dict[str, dict[str, int]] = {}

    def write(name: str, content: bytes, count: int) -> None:
        file.write(b"\0" * (-file.tell() % 16))
        parts[name] = {"offset": file.tell(), "count": count}
        file.write(content)

    first_documents: list[int] = [0]
    token_bytes: list[int] = []
    for documents, width in documents_of_files:
        file.write(documents.tobytes())
        first_documents.append(first_documents[-1] + len(documents))
        token_bytes.append(width)
    count = first_documents[-1]
    parts["documents"] = {"offset": 0, "count": count}
    file.flush()

    table = np.zeros(len(first_documents), dtype=FILE)
    table["first_document"], table["token_bytes"][:-1] = first_documents, token_bytes
    write("files", table.tobytes(), len(table))
    file.flush()
    bounds, checksums = _look_at_blocks(file, count)
    for split, bounds_of_split in zip(SPLITS, bounds, strict=True):
        write(f"bounds_{split}", bounds_of_split.tobytes(), len(bounds_of_split))
    write("checksums", checksums.tobytes(), len(checksums))
    names = json.dumps(dict(zip(files.paths, files.sizes, strict=True))).encode()
    write("names", names, len(names))
    header = {
        "index": index_digest(files, config),
        "settings": settings_digest(files, config),
        "files": files.digest,
        "changes": change,
        "parts": parts,
    }
    text = json.dumps(header).encode()
    file.write(text)
    file.flush()
    documents_end = count * DOCUMENT.itemsize
    checksum = zlib.crc32(os.pread(file.fileno(), file.tell() - documents_end, documents_end))
    file.write(TRAILER.pack(documents_end, len(text), checksum, MAGIC))


def _read_file(files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int) -> _FileDocuments:
    """Read the documents of a file; a DataError names one that cannot be used."""
    path = files.path(number)
    with plugin_errors("file_type", files.file_type):
        layout = token_format.documents(path)
    too_long = np.flatnonzero(layout.lengths > _LARGEST_LENGTH)
    if len(too_long):
        row = int(too_long[0])
        raise DataError(
            f"a document of {layout.lengths[row]:,} tokens is too long (at most {_LARGEST_LENGTH:,})",
            path=path,
            row=row,
        )
    documents = documents_as_trained(layout, config)
    held_out = held_out_mask(files.name, config.held_out_fraction, files.paths[number], len(documents))
    documents["flags"][held_out] |= HELD_OUT
    width = -layout.width if layout.tokens.dtype.kind == "i" else layout.width
    return documents, width


def _look_at_blocks(file: IO[bytes], count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the documents' tokens before each block, [blocks + 1] for every split, and the blocks' checksums."""
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
    """Return the documents of a file as the index has them, [n] `DOCUMENT`, without the flag of their split.

    stored tokens --strip_tokens: taken off both ends--> --min_length: of too few, none are left--> kept tokens
    kept tokens, if any --bos_token, sep_token: virtual where they are not there already--> the document
    """
    tokens, begins = layout.tokens, layout.offsets // layout.width
    begins, ends = _strip(tokens, begins, begins + layout.lengths, set(config.strip_tokens))
    kept = np.flatnonzero(ends - begins >= config.min_length)
    documents = np.zeros(len(begins), dtype=DOCUMENT)
    documents["offset"], documents["tokens"][kept] = begins * layout.width, (ends - begins)[kept]
    for token, places, flag in ((config.bos_token, begins, VIRTUAL_BOS), (config.sep_token, ends - 1, VIRTUAL_SEP)):
        if token is not None:
            documents["flags"][kept[~_is_any_of(tokens[places[kept]], [token])]] |= flag
    return documents


def _strip(
    tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, strip_tokens: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Take the tokens of a set off both ends of every document, [begin, end) in `tokens` each, however many."""
    if not strip_tokens:
        return begins, ends
    begins = begins + _run_lengths(tokens, begins, 1, ends - begins, strip_tokens)
    return begins, ends - _run_lengths(tokens, ends - 1, -1, ends - begins, strip_tokens)


def _run_lengths(
    tokens: np.ndarray, firsts: np.ndarray, direction: int, limits: np.ndarray, wanted: Collection[int]
) -> np.ndarray:
    """Count wanted tokens that follow each other from `firsts` in a direction, at most `limits`, [n] int64.

    All documents are looked at together, one token deeper each time.
    """
    runs = np.zeros(len(firsts), dtype=np.int64)
    going_on = np.flatnonzero(limits)
    while len(going_on):
        going_on = going_on[_is_any_of(tokens[firsts[going_on] + direction * runs[going_on]], wanted)]
        runs[going_on] += 1
        going_on = going_on[runs[going_on] < limits[going_on]]
    return runs


def _is_any_of(tokens: np.ndarray, wanted: Collection[int]) -> np.ndarray:
    """Return which tokens are among the wanted ones, some of which the type of the tokens may not hold."""
    found = np.zeros(tokens.shape, dtype=bool)
    for token in wanted:
        if token <= np.iinfo(tokens.dtype).max:
            found |= tokens == token
    return found
