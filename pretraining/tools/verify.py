"""`pretrain verify`: a full check of token files or checkpoints, which names every faulty file.

    token files  listing, prepare.json -> threads, one file each: checksum -> structure -> tokens
    checkpoints  manifest -> threads, one file each: checksum -> headers -> every element once

Training checks token files only as it reads them: names and sizes at the start, the footer when it opens a file, bounds
and vocabulary when it reads a document. In a file with a damaged structure or wrong tokens, only the first place is
reported. A start checks its checkpoint with the functions used here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretraining.checkpoint.completeness import tensor_faults
from pretraining.checkpoint.headers import read_headers
from pretraining.checkpoint.manifest import MANIFEST, shape_of
from pretraining.checkpoint.reader import file_faults
from pretraining.checkpoint.run_folder import (
    CHECKPOINTS,
    committed_checkpoints,
    misnamed_files,
    read_document,
    run_of,
)
from pretraining.checkpoint.start_point import checkpoints_at
from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE, DatasetFiles, list_datasets, prepared_folders
from pretraining.data.storage.document_records import local_copy
from pretraining.data.storage.doubts import warn_about_splits
from pretraining.data.storage.index_folder import read_local, recorded_indices
from pretraining.data.storage.token_format import DocumentLayout, contiguous_bytes, load_format, width_problem
from pretraining.errors import CheckpointError, DataError, PretrainError
from pretraining.files import file_checksum, path_error
from pretraining.launch.terminal import print_text
from pretraining.object_store import location
from pretraining.text import count_of, format_bytes
from pretraining.tools.command_settings import VerifyConfig
from pretraining.tools.prepare.records import read_summary
from pretraining.tools.prepare.token_files import TokenFile


def verify(config: VerifyConfig) -> None:
    """Check token files or checkpoints, and print faults as they are found.

    Raises:
        DataError, CheckpointError: faults were found, or there is nothing to check.
    """
    threads = config.num_workers or min(32, os.cpu_count() or 1)
    if config.ckpt_path is None:
        _verify_datasets(config, threads)
    else:
        _verify_checkpoints(Path(config.ckpt_path), threads)


# Token files


class FileReport(NamedTuple):
    """The faults of a token file; if it can be read, its size and the record of its content."""

    faults: list[PretrainError]
    documents: int = 0
    tokens: int = 0
    record: int | None = None


def _verify_datasets(config: VerifyConfig, threads: int) -> None:
    shared = vars(config).keys() & vars(DataConfig()).keys() - {"num_workers"}
    data = DataConfig(**{name: getattr(config, name) for name in shared})
    listing = list_datasets(data)
    warn_about_splits(listing, data)
    prepared = [] if config.datasets else prepared_folders(location(data.data_path or "").absolute())
    empty = sorted({str(folder) for folder in prepared} - {files.folder for files in listing})
    faults = _print_faults(DataError(f"has a {MANIFEST_FILE} but no token files", path=folder) for folder in empty)
    faults += sum(_verify_dataset(files, data, config.vocab_size, threads) for files in listing)
    count = count_of(sum(len(files.paths) for files in listing), "file")
    if faults:
        raise DataError(f"{count_of(faults, 'fault')} in {count} of {data.data_path}, listed above")
    print_text(f"{count}, {format_bytes(sum(sum(files.sizes) for files in listing))}: no faults")


def _verify_dataset(files: DatasetFiles, data: DataConfig, vocab_size: int | None, threads: int) -> int:
    """Read all token files of a dataset; print its faults, or a line if it has none. Return the number of faults."""
    written, faults = dict[str, TokenFile](), 0
    try:
        summary = read_summary(files.root)
        written, vocab_size = {file.name: file for file in summary.files}, vocab_size or summary.vocab_size
    except FileNotFoundError:
        pass
    except DataError as error:
        faults += _print_faults([error])
    # If a single file is the dataset, prepare.json may list other files.
    gone = [] if files.is_file else sorted(written.keys() - set(files.paths))
    faults += _print_faults(DataError(f"is missing: {MANIFEST_FILE} lists it", path=files.root / name) for name in gone)
    token_format, reports = load_format(files.file_type, data), list[FileReport]()

    def check(number: int) -> FileReport:
        faults: list[PretrainError] = []
        try:
            with local_copy(files, number, data.data_cache_path) as local:
                faults += _changes_of(files, number, Path(local), written)
                layout, record = read_local(files, token_format, number, local)
                faults += _wrong_tokens(files.path(number), layout, vocab_size)
                return FileReport(faults, len(layout.lengths), int(layout.lengths.sum()), record)
        except PretrainError as error:
            return FileReport([*faults, error])
        except OSError as error:
            return FileReport([path_error(error, files.path(number))])

    with ThreadPoolExecutor(threads) as pool:
        for report in pool.map(check, range(len(files.paths))):
            faults += _print_faults(report.faults)
            reports.append(report)
    faults += _print_faults(_changes_since_indexing(files, data, reports))
    if not faults:
        documents, tokens = sum(report.documents for report in reports), sum(report.tokens for report in reports)
        vocabulary = f"all below {vocab_size:,}" if vocab_size else "vocabulary not checked: set --vocab_size"
        checksums = f"checksums as in {MANIFEST_FILE}" if written else f"no checksums in a {MANIFEST_FILE}"
        size = f"{count_of(len(files.paths), 'file')}, {count_of(documents, 'document')}, {tokens:,} tokens"
        print_text(f"dataset '{files.name}': {size} ({vocabulary}; {checksums})")
    return faults


def _changes_of(files: DatasetFiles, number: int, local: Path, written: Mapping[str, TokenFile]) -> list[DataError]:
    """Return how the bytes of a file differ from those that were written; raise an OSError if it cannot be read."""
    # Read before it is mapped: a disk error raises here, but kills a process that uses a mapped file.
    checksum, size = file_checksum(local)
    path, entry = files.path(number), written.get(files.paths[number])
    if written and entry is None:
        return [DataError(f"is not listed in {MANIFEST_FILE}", path=path)]
    if entry is None or (size, checksum) == (entry.bytes, entry.crc32):
        return []
    change = f"{entry.bytes:,} bytes of checksum {entry.crc32}; now {size:,} bytes of checksum {checksum}"
    return [DataError(f"has changed since `pretrain prepare` wrote {change}", path=path)]


def _changes_since_indexing(files: DatasetFiles, data: DataConfig, reports: list[FileReport]) -> list[DataError]:
    """Return an error per file without another fault whose content is not that of the newest index."""
    index = next(iter(recorded_indices(files, data)), None)
    if index is None:
        return []
    problem = f"has other content than in {index.path}. If the change is meant, delete this index"
    return [
        DataError(problem, path=files.path(number))
        for number, report in enumerate(reports)
        if not report.faults and report.record != int(index.records[number])
    ]


def _print_faults(faults: Iterable[PretrainError]) -> int:
    texts = list(map(str, faults))
    for text in texts:
        print_text(text)
    return len(texts)


def _wrong_tokens(path: str, layout: DocumentLayout, vocab_size: int | None) -> list[DataError]:
    """Return an error with the first row that has a negative token or one beyond the vocabulary, or the right width."""
    rows = np.flatnonzero(layout.lengths)
    if not len(rows):
        return []
    first, last = contiguous_bytes(layout.offsets, layout.lengths, layout.width)
    problem = width_problem(layout.tokens[first // layout.width : last // layout.width])
    if problem is not None:  # then each of its tokens is wrong
        return [DataError(problem, path=path)]
    rows = rows[np.argsort(layout.offsets[rows], kind="stable")]
    begins = layout.offsets[rows] // layout.width
    ends = begins + layout.lengths[rows]
    tokens = layout.tokens.view(f"<u{layout.width}")  # negative tokens become the largest
    end = min(vocab_size or math.inf, np.iinfo(layout.tokens.dtype).max + 1)
    bounds = np.stack([begins, ends], axis=1).ravel()[:-1]  # bytes between record batches belong to no document
    wrong = rows[np.maximum.reduceat(tokens[: ends[-1]], bounds)[::2] >= end]
    if not len(wrong):
        return []
    row = int(wrong.min())
    begin = int(layout.offsets[row]) // layout.width
    at = begin + int(np.argmax(tokens[begin : begin + int(layout.lengths[row])] >= end))
    place = f"token {at - begin} of the document, at byte {at * layout.width:,}, is {layout.tokens[at]}"
    vocabulary = "no token is negative" if vocab_size is None else f"the vocabulary is 0 to {vocab_size - 1}"
    return [DataError(f"{place}, but {vocabulary}; {len(wrong):,} such rows in this file", path=path, row=row)]


# Checkpoints


def _verify_checkpoints(source: Path, threads: int) -> None:
    is_one, damaged = checkpoints_at(source) == [source], 0
    paths = [source] if is_one else [saved.path for saved in committed_checkpoints(run_of(source))]
    if not paths:
        raise CheckpointError(
            f"neither a checkpoint (a folder with {MANIFEST}, or four .pt files) nor a run with checkpoints in "
            f"{CHECKPOINTS}/. To check token files, set --data_path",
            path=source,
        )
    for path in paths:
        faults = faults_of(path, threads)
        damaged += bool(faults)
        for fault in faults:
            print_text(fault)
        if not faults:
            manifest = read_document(path)
            size = format_bytes(sum((path / name).stat().st_size for name in manifest.files))
            print_text(f"{path}: step {manifest.step}, {count_of(len(manifest.files), 'file')}, {size}: no faults")
    if damaged:
        raise CheckpointError(f"damaged: {damaged} of {count_of(len(paths), 'checkpoint')}; faults are listed above")


def faults_of(path: Path, threads: int = 1) -> list[str]:
    """Read everything in a checkpoint on `threads` threads, and return a line per fault."""
    try:
        manifest = read_document(path)
        shape_of(manifest)
    except CheckpointError as error:
        return [str(error)]
    misnamed = list(misnamed_files(path, manifest))
    inside = {name: entry for name, entry in manifest.files.items() if Path(name).name == name}
    faults = file_faults(path, inside, threads)
    try:  # the tensors are checked only if all files are good: a bad file would make each of its tensors a fault
        return misnamed + (faults or tensor_faults(read_headers(path, inside), manifest))
    except CheckpointError as error:
        return [*misnamed, str(error)]
