"""`pretrain verify`: a full check of token files or checkpoints that reports every fault.

    token files  listing, prepare.json -> threads, one file each: checksum -> structure -> tokens
    checkpoints  manifest -> threads, one file each: checksum -> headers -> every element once

Training checks token files only as it reads them: names and sizes at the start, the footer when it opens a file, bounds
and vocabulary when it reads a document. For a file with a damaged structure, only the first fault is reported. A start
checks its checkpoint with the functions used here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pretraining.checkpoint.completeness import tensor_faults
from pretraining.checkpoint.forms import misnamed_files, read_document
from pretraining.checkpoint.headers import read_headers
from pretraining.checkpoint.manifest import MANIFEST, shape_of
from pretraining.checkpoint.reader import file_faults
from pretraining.checkpoint.run_folder import CHECKPOINTS, committed_checkpoints, run_of, unfinished_saves
from pretraining.checkpoint.start_point import checkpoints_at
from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE, DatasetFiles, list_datasets, prepared_folders
from pretraining.data.storage.document_records import local_copy
from pretraining.data.storage.doubts import describe_masks, rows_of, warn_about_splits
from pretraining.data.storage.index_files import read_local, recorded_indices
from pretraining.data.storage.token_format import (
    DocumentLayout,
    contiguous_bytes,
    load_format,
    width_problem,
)
from pretraining.errors import CheckpointError, DataError, PretrainError
from pretraining.files import file_checksum
from pretraining.launch.terminal import print_text
from pretraining.object_store import location
from pretraining.text import count_of, format_bytes
from pretraining.tools.commands import VerifyConfig
from pretraining.tools.prepare.records import read_summary
from pretraining.tools.prepare.token_files import TokenFile

log = logging.getLogger(__name__)

FAULTS_SHOWN = 100
"""Rows reported per file. In a file of another tokenizer, nearly every row has a wrong token."""
_TOKENS_AT_ONCE = 1 << 22


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


@dataclass
class FileReport:
    """The size and the faults of a token file, the record of its content, and how a column masks its tokens."""

    faults: list[PretrainError] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    record: int | None = None
    masks: str | None = None


def _verify_datasets(config: VerifyConfig, threads: int) -> None:
    shared = vars(config).keys() & vars(DataConfig()).keys() - {"num_workers"}
    data = DataConfig(**{name: getattr(config, name) for name in shared})
    listing = list_datasets(data)
    warn_about_splits(listing, data)
    file_count, size = sum(len(files.paths) for files in listing), sum(sum(files.sizes) for files in listing)
    faults = _print_faults([] if config.datasets else _datasets_without_files(data, listing))
    for files in listing:
        faults_before = faults
        written, vocab_size, damaged = _read_record(files)
        vocab_size = config.vocab_size or vocab_size
        # If a single file is the dataset, prepare.json may list other files.
        gone = [] if files.is_file else sorted(written.keys() - set(files.paths))
        missing = [DataError(f"is missing: {MANIFEST_FILE} lists it", path=f"{files.folder}/{name}") for name in gone]
        faults += _print_faults([*damaged, *missing])
        reports = []
        for report in check_files(files, data, written, vocab_size, threads):
            faults += _print_faults(report.faults)
            reports.append(report)
        faults += _print_faults(_changes_since_indexing(files, data, reports))
        masked = [(number, report.masks) for number, report in enumerate(reports) if report.masks is not None]
        if masked:
            number, masks = masked[0]
            log.warning("%s: %s (%s)", files.path(number), masks, f"{len(masked)} of {count_of(len(reports), 'file')}")
        vocabulary = f"all below {vocab_size:,}" if vocab_size else "vocabulary not checked: set --vocab_size"
        compared = bool(written) and all(entry.crc32 for entry in written.values())
        checksums = f"checksums as in {MANIFEST_FILE}" if compared else f"no checksums in a {MANIFEST_FILE}"
        if faults == faults_before:
            documents, tokens = sum(each.documents for each in reports), sum(each.tokens for each in reports)
            print_text(
                f"dataset '{files.name}': {count_of(len(files.paths), 'file')}, {count_of(documents, 'document')}, "
                f"{tokens:,} tokens ({vocabulary}; {checksums})"
            )
    if faults:
        raise DataError(
            f"{count_of(faults, 'fault')} in {count_of(file_count, 'file')} of {data.data_path}, listed above"
        )
    print_text(f"{count_of(file_count, 'file')}, {format_bytes(size)}: no faults")


def _changes_since_indexing(files: DatasetFiles, data: DataConfig, reports: list[FileReport]) -> list[DataError]:
    """Return an error per file without another fault whose content is that of no index."""
    records = [None if report.faults else report.record for report in reports]
    indices = recorded_indices(files, data)
    changed = [
        [number for number, now in enumerate(records) if now not in (None, int(index.records[number]))]
        for index in indices
    ]
    if not changed or not all(changed):
        return []
    problem = f"has other content than in {indices[0].path}. If the change is meant, delete this index"
    return [DataError(problem, path=files.path(number)) for number in changed[0]]


def _print_faults(faults: Sequence[PretrainError]) -> int:
    for fault in faults:
        print_text(str(fault))
    return len(faults)


def _datasets_without_files(data: DataConfig, listing: tuple[DatasetFiles, ...]) -> list[DataError]:
    """Return an error per prepared dataset without token files, which `list_datasets` skips."""
    assert data.data_path is not None
    prepared = {str(folder) for folder in prepared_folders(location(data.data_path).absolute())}
    empty = sorted(prepared - {files.folder for files in listing})
    return [DataError(f"has a {MANIFEST_FILE} but no token files", path=folder) for folder in empty]


def _read_record(files: DatasetFiles) -> tuple[dict[str, TokenFile], int | None, list[DataError]]:
    """Return the files and the vocabulary size of prepare.json, and its faults; empty if the file is missing."""
    try:
        summary = read_summary(files.root)
    except FileNotFoundError:
        return {}, None, []
    except DataError as error:
        return {}, None, [error]
    return {file.name: file for file in summary.files}, summary.vocab_size, []


def check_files(
    files: DatasetFiles,
    data: DataConfig,
    written: Mapping[str, TokenFile],
    vocab_size: int | None,
    threads: int,
) -> Iterator[FileReport]:
    """Read all token files of a dataset, and yield their reports in order.

    Args:
        written: files listed in prepare.json; empty without prepare.json.
        vocab_size: upper bound of tokens; None = only negative tokens are faults.
    """
    token_format = load_format(files.file_type, data)

    def check(number: int) -> FileReport:
        report = FileReport()
        try:
            with local_copy(files, number, data.data_cache_path) as local:
                check_copy(number, local, report)
        except PretrainError as error:
            report.faults.append(error)
        return report

    def check_copy(number: int, local: str, report: FileReport) -> None:
        path, name = files.path(number), files.paths[number]
        if written and name not in written:
            report.faults.append(DataError(f"is not listed in {MANIFEST_FILE}", path=path))
        try:
            # Read before it is mapped: a disk error raises here, but kills a process that uses a mapped file.
            checksum, size = file_checksum(Path(local))
        except OSError as error:
            report.faults.append(DataError(f"cannot be read: {error.strerror or error}", path=path))
            return
        if size != files.sizes[number]:
            listed = f"it had {files.sizes[number]:,} bytes, now {size:,}"
            report.faults.append(DataError(f"has changed since it was listed: {listed}", path=path))
        entry = written.get(name)
        if entry is not None and (size, checksum) != (entry.bytes, entry.crc32 or checksum):
            change = f"{entry.bytes:,} bytes of checksum {entry.crc32}; now {size:,} bytes of checksum {checksum}"
            report.faults.append(DataError(f"has changed since `pretrain prepare` wrote {change}", path=path))
        layout, report.record = read_local(files, token_format, number, local)
        report.documents, report.tokens = len(layout.lengths), int(layout.lengths.sum())
        report.masks = describe_masks(rows_of(Path(local)), data.col_name, data.strip_tokens)
        wrong_type = width_problem(_sample(layout))
        if wrong_type is not None:  # then each of its tokens is wrong
            report.faults.append(DataError(wrong_type, path=path))
            return
        report.faults += _wrong_tokens(path, layout, vocab_size)

    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(check, range(len(files.paths)))


def _sample(layout: DocumentLayout) -> np.ndarray:
    begin, end = contiguous_bytes(layout.offsets, layout.lengths, layout.width)
    tokens: np.ndarray = layout.tokens[begin // layout.width : end // layout.width]
    return tokens


def _wrong_tokens(path: str, layout: DocumentLayout, vocab_size: int | None) -> list[DataError]:
    """Return an error per row with a negative token or one beyond the vocabulary; it names the first such token."""
    largest = np.iinfo(layout.tokens.dtype).max
    end = largest + 1 if vocab_size is None else min(vocab_size, largest + 1)
    unsigned = np.dtype(f"<u{layout.width}")
    rows = np.flatnonzero(layout.lengths)
    if end > np.iinfo(unsigned).max or not len(rows):
        return []
    tokens = layout.tokens.view(unsigned)  # negative tokens become the largest
    rows = rows[np.argsort(layout.offsets[rows], kind="stable")]
    begins = layout.offsets[rows] // layout.width
    ends = begins + layout.lengths[rows]
    firsts: dict[int, int] = {}
    for at in range(int(begins[0]), int(ends[-1]), _TOKENS_AT_ONCE):
        places = at + np.flatnonzero(tokens[at : at + _TOKENS_AT_ONCE] >= end)
        owners = np.searchsorted(begins, places, side="right") - 1
        inside = places < ends[owners]  # bytes between record batches belong to no document
        found, first = np.unique(owners[inside], return_index=True)
        for owner, place in zip(found[: FAULTS_SHOWN + 1], places[inside][first], strict=False):
            firsts.setdefault(int(rows[owner]), int(place))
        if len(firsts) > FAULTS_SHOWN:
            break
    vocabulary = "no token is negative" if vocab_size is None else f"the vocabulary is 0 to {vocab_size - 1}"
    faults = []
    for row, place in sorted(firsts.items())[:FAULTS_SHOWN]:
        position = place - int(layout.offsets[row]) // layout.width
        token = f"token {position} of the document, at byte {place * layout.width:,}, is {layout.tokens[place]}"
        faults.append(DataError(f"{token}, but {vocabulary}", path=path, row=row))
    if len(firsts) > FAULTS_SHOWN:
        faults.append(DataError("more rows have wrong tokens", path=path))
    return faults


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
        print_text(f"reading {path}", file=sys.stderr)
        faults = faults_of(path, threads)
        damaged += bool(faults)
        for fault in faults or [_describe(path)]:
            print_text(fault)
    for path in unfinished_saves(run_of(source)):
        print_text(f"{path} is an unfinished save: training ignores it, and it is no fault")
    if damaged:
        raise CheckpointError(f"damaged: {damaged} of {count_of(len(paths), 'checkpoint')}; faults are listed above")


def _describe(path: Path) -> str:
    """Return the line about a checkpoint without faults."""
    manifest = read_document(path)
    size = format_bytes(sum((path / name).stat().st_size for name in manifest.files))
    return f"{path}: step {manifest.step}, {count_of(len(manifest.files), 'file')}, {size}: no faults"


def faults_of(path: Path, threads: int = 1) -> list[str]:
    """Read everything in a checkpoint on `threads` threads, and return a line per fault."""
    try:
        manifest = read_document(path)
        shape_of(manifest)
    except CheckpointError as error:
        return [str(error)]
    misnamed = list(misnamed_files(path, manifest))
    own = {name: entry for name, entry in manifest.files.items() if Path(name).name == name}
    faults = file_faults(path, own, threads)
    try:  # the tensors are checked only if all files are good: a bad file would make each of its tensors a fault
        return misnamed + (faults or tensor_faults(read_headers(path, own), manifest))
    except CheckpointError as error:
        return [*misnamed, str(error)]
