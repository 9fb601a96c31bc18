"""Making the index of a dataset: all its files are looked at, in parallel, and the result is renamed into place.

    files --TokenFormat.documents, on threads--> documents --in order--> temporary file --block totals, header--> rename

Any number of processes may build the same index at once: each writes its own temporary file, they are all equal, and
the first that is done stays. Memory does not grow with the dataset.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from pretraining.config.plugins import plugin_errors
from pretraining.config.training import DataConfig
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.storage.dataset_files import COUNTS_FILES, DatasetFiles, describe_changes
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
from pretraining.files import check_regular, exists
from pretraining.launch.machine import usable_cores
from pretraining.text import count_of, format_bytes, list_some

log = logging.getLogger(__name__)

_FileDocuments = tuple[np.ndarray, int, int]
"""The documents of a file, [rows] `DOCUMENT`, its bytes a token, and the tokens stored in it."""

_PROBLEMS_SHOWN = 10
_BLOCKS_AT_ONCE = 4096
_FILES_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 24  # of tiny files, handing over each one would cost as much as reading it
_LARGEST_LENGTH = 2**32 - 3  # a length is 32 bits, and two virtual tokens may come on top


def build_index(files: DatasetFiles, config: DataConfig, workers: int | None = None) -> Index:
    """Returns the dataset's index, made first where there is no valid one.

    `workers` are threads that look at files; None = as many as cores, at most 32.

    Raises:
        DataError: a file cannot be used, or there is no place to write the index.
    """
    index = open_index(files, config)
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
    held: dict[str, tuple[int, int]] = {}

    def write(file: IO[bytes]) -> None:
        held.update(_write_index(file, files, config, change, _read_files(files, config, workers)))

    find = partial(open_index, files, config)
    index = write_once(index_places(files, config), f"the index of dataset '{files.name}'", write, find)
    contradictions = describe_contradictions(files, held)
    if contradictions:
        log.info(contradictions)
    return index


def open_index(files: DatasetFiles, config: DataConfig) -> Index | None:
    """Opens the index of a dataset, if there is a valid one, as one that mends itself from the dataset's files."""
    index = find_index(files, config)
    if index is not None:
        index.read_again = partial(_read_again, files, config, index.first_documents)
    return index


def _read_again(
    files: DatasetFiles, config: DataConfig, first_documents: np.ndarray, begin: int, end: int
) -> np.ndarray:
    """Reads documents [begin, end) as the index has them, [end - begin] `DOCUMENT`."""
    token_format = load_format(files.file_type, config)
    first, last = (np.searchsorted(first_documents, (begin, end - 1), side="right") - 1).tolist()
    found = [_read_file(files, config, token_format, number)[0] for number in range(first, last + 1)]
    skipped = begin - int(first_documents[first])
    documents: np.ndarray = np.concatenate(found)[skipped : skipped + end - begin]
    return documents


def held_out_mask(dataset: str, fraction: float, path: str, rows: int) -> np.ndarray:
    """Tells which rows of a file are held out, [rows] bool: those whose hash is below the fraction."""
    threshold = int(fraction * 2**64)
    if threshold == 0:
        return np.zeros(rows, dtype=bool)
    if threshold >= 2**64:
        return np.ones(rows, dtype=bool)
    key = derive_key(Purpose.HELD_OUT, text_key(dataset, path))
    return hash64(key, np.arange(rows)) < np.uint64(threshold)


def _what_changed(files: DatasetFiles, config: DataConfig) -> str:
    """Says which files differ from those of the newest older index at one of the places."""
    for place in index_places(files, config):
        found = place.parent.glob(f"{index_digest(files, config)}-*.index")
        for older_place in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            older = open_any_index(older_place)
            if older is not None:
                return describe_changes(older.file_sizes, dict(zip(files.paths, files.sizes, strict=True)))
    return ""


def _write_index(
    file: IO[bytes],
    files: DatasetFiles,
    config: DataConfig,
    change: str,
    documents_of_files: Iterable[_FileDocuments],
) -> dict[str, tuple[int, int]]:
    """Writes a whole index; returns documents and tokens that each file holds, by path."""
    parts: dict[str, dict[str, int]] = {}

    def write(name: str, content: bytes, count: int) -> None:
        file.write(b"\0" * (-file.tell() % 16))
        parts[name] = {"offset": file.tell(), "count": count}
        file.write(content)

    first_documents: list[int] = [0]
    token_bytes: list[int] = []
    held: dict[str, tuple[int, int]] = {}
    for documents, width, stored_tokens in documents_of_files:
        held[files.paths[len(token_bytes)]] = (len(documents), stored_tokens)
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
    return held


def _read_file(files: DatasetFiles, config: DataConfig, token_format: TokenFormat, number: int) -> _FileDocuments:
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
    return documents, width, int(layout.lengths.sum())


def _look_at_blocks(file: IO[bytes], count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the documents' tokens before each block, [blocks + 1] for every split, and the blocks' checksums."""
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


def _read_files(files: DatasetFiles, config: DataConfig, workers: int | None) -> Iterator[_FileDocuments]:
    """Yields the documents of each file, in order; a DataError names files that cannot be used, up to a number."""
    token_format = load_format(files.file_type, config)

    def read(numbers: range) -> list[_FileDocuments | DataError]:
        found: list[_FileDocuments | DataError] = []
        for number in numbers:
            try:
                found.append(_read_file(files, config, token_format, number))
            except DataError as problem:
                found.append(problem)
        return found

    problems: list[DataError] = []
    threads = workers or min(32, usable_cores())
    with closing(map_in_order(read, _groups(files.sizes), threads)) as groups:
        for result in chain.from_iterable(groups):
            if isinstance(result, DataError):
                problems.append(result)
            elif not problems:
                yield result
            if len(problems) == _PROBLEMS_SHOWN:
                break
    if problems:
        raise problems[0] if len(problems) == 1 else DataError("\n".join(map(str, problems)))


def _groups(sizes: Sequence[int]) -> Iterator[range]:
    """Yields numbers of files that follow each other, as many as a thread looks at before it hands over the results."""
    begin = group_bytes = 0
    for number, size in enumerate(sizes):
        if number - begin == _FILES_AT_ONCE or (number > begin and group_bytes + size > _BYTES_AT_ONCE):
            yield range(begin, number)
            begin, group_bytes = number, 0
        group_bytes += size
    if begin < len(sizes):
        yield range(begin, len(sizes))


_LOOKED_AT_ONCE = 1 << 20


def documents_as_trained(layout: DocumentLayout, config: DataConfig) -> np.ndarray:
    """Returns the documents of a file as the index has them, [n] `DOCUMENT`, without the flag of their split.

    stored tokens --strip_tokens: taken off both ends--> --min_length: of too few, none are left--> kept tokens
    kept tokens, if any --bos_token, sep_token: virtual where they are not there already--> the document
    """
    tokens, begins = layout.tokens, layout.offsets // layout.width
    begins, ends = _strip(tokens, begins, begins + layout.lengths, set(config.strip_tokens))
    kept = np.flatnonzero(ends - begins >= config.min_length)
    documents = np.zeros(len(begins), dtype=DOCUMENT)
    documents["offset"], documents["tokens"][kept] = begins * layout.width, (ends - begins)[kept]
    for token, places, flag in (
        (config.bos_token, begins, VIRTUAL_BOS),
        (config.sep_token, ends - 1, VIRTUAL_SEP),
    ):
        if token is not None:
            documents["flags"][kept[~_is_any_of(tokens[places[kept]], [token])]] |= flag
    return documents


def _strip(
    tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray, strip_tokens: Collection[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Takes the tokens of a set off both ends of every document, [begin, end) in `tokens` each, however many."""
    if not strip_tokens:
        return begins, ends
    begins = begins + _run_lengths(tokens, begins, 1, ends - begins, strip_tokens)
    return begins, ends - _run_lengths(tokens, ends - 1, -1, ends - begins, strip_tokens)


def _run_lengths(
    tokens: np.ndarray, firsts: np.ndarray, direction: int, limits: np.ndarray, wanted: Collection[int]
) -> np.ndarray:
    """Counts wanted tokens that follow each other from `firsts` in a direction, at most `limits`, [n] int64.

    All documents are looked at together: one token deep, then two more, four more, ... where they still go on.
    """
    runs = np.zeros(len(firsts), dtype=np.int64)
    going_on, depth = np.flatnonzero(limits), 1
    while len(going_on):
        still = []
        size = _LOOKED_AT_ONCE // depth
        for some in (going_on[begin : begin + size] for begin in range(0, len(going_on), size)):
            steps = runs[some, None] + np.arange(depth)  # some depth
            inside = steps < limits[some, None]
            places = firsts[some, None] + direction * np.where(inside, steps, 0)
            is_wanted = _is_any_of(tokens[places], wanted) & inside
            found = np.where(is_wanted.all(axis=1), depth, is_wanted.argmin(axis=1))
            runs[some] += found
            still.append(some[found == depth])
        going_on, depth = np.concatenate(still), min(2 * depth, _LOOKED_AT_ONCE)
    return runs


def _is_any_of(tokens: np.ndarray, wanted: Collection[int]) -> np.ndarray:
    """Tells which tokens are among the wanted ones, some of which the type of the tokens may not hold."""
    found = np.zeros(tokens.shape, dtype=bool)
    for token in wanted:
        if token <= np.iinfo(tokens.dtype).max:
            found |= tokens == token
    return found


_FILES_SHOWN = 3


def describe_contradictions(files: DatasetFiles, held: Mapping[str, tuple[int, int]]) -> str | None:
    """Says in a line how the counts files contradict what a dataset's files hold; None where nothing does.

    fms-fsdp keeps a table `meta/*counts*.csv` beside its datasets, with the header `dataset/filename,documents,tokens`.
    It tells of files that were cut short, swapped or lost since it was made. `held` are documents and tokens by path.
    """
    lines = []
    for place, dataset in _places(files):
        try:
            counts = _read(place, dataset)
        except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
            lines.append(f"{place} cannot be read ({type(error).__name__}: {error}), so nothing is compared with it")
            continue
        wrong = [text for path, count in counts.items() if (text := _contradiction(files, path, count, held.get(path)))]
        if wrong:
            found = list_some(wrong, _FILES_SHOWN, "; ")
            lines.append(f"{place} contradicts the files, which are believed: {found}")
    return f"dataset '{files.name}': {'; '.join(lines)}" if lines else None


def _places(files: DatasetFiles) -> Iterator[tuple[Path, str]]:
    """Counts files, from beside the dataset up to data_path, each with the name that the dataset has there."""
    folder = Path(files.folder)
    for parent in folder.parents[: len(Path(files.name).parts)]:
        for place in sorted(parent.glob(COUNTS_FILES)):
            yield place, folder.relative_to(parent).as_posix()


def _read(place: Path, dataset: str) -> dict[str, tuple[int, int]]:
    """Documents and tokens of the dataset's files, by path. A row names `dataset/path`, whatever stands before that."""
    counts = {}
    check_regular(place)
    with place.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            _, found, path = f"/{row['dataset/filename']}".partition(f"/{dataset}/")
            if found:
                counts[path] = (int(row["documents"]), int(row["tokens"]))
    return counts


def _contradiction(files: DatasetFiles, path: str, count: tuple[int, int], held: tuple[int, int] | None) -> str | None:
    if held is None:
        return None if exists(Path(files.folder, path)) else f"{path} is gone"
    if count == held:
        return None
    return f"{path} has {held[0]:,} documents of {held[1]:,} tokens, not {count[0]:,} of {count[1]:,}"
