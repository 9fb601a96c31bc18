"""Reads every token file wholly and names every fault: `pretrain verify`.

    listing, prepare.json -> on threads, a file at a time: bytes and checksum -> structure -> tokens -> faults

Training checks only what it touches: names and sizes at the start, the footer when a file is opened, bounds and
vocabulary when a document is read. Here everything is looked at. Where a file's structure is damaged its first fault is
named, as what follows from there cannot be trusted; of wrong tokens every row is.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from pretraining.config.commands import VerifyConfig
from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import MANIFEST_FILE, DatasetFiles, list_datasets
from pretraining.data.storage.token_format import DocumentLayout, TokenFormat, load_format
from pretraining.errors import DataError
from pretraining.files import file_checksum, read_json
from pretraining.launch.terminal import print_text, showing_through
from pretraining.text import count_of
from pretraining.tools.prepare.console import LINE_INTERVAL_SECONDS
from pretraining.tools.prepare.token_files import TokenFile

log = logging.getLogger(__name__)

FAULTS_SHOWN = 100
"""Rows of a file that are named one by one; of a file of another tokenizer nearly all would be."""
_TOKENS_AT_ONCE = 1 << 22
_SHARED_SETTINGS = ("data_path", "datasets", "file_type", "col_name", "sep_token", "token_dtype")
"""Settings that mean the same for training."""


@dataclass
class FileReport:
    """What was found in a file: faults, a line each, what it holds, and whether its checksum was compared."""

    faults: list[str] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    compared: bool = False


@dataclass(frozen=True)
class _Record:
    """What prepare.json says of a dataset, if there is one, and what is wrong with prepare.json itself.

    `vocab_size` is the user's, where one is given; None = unknown.
    """

    files: dict[str, TokenFile]
    vocab_size: int | None
    faults: tuple[str, ...] = ()


def verify(config: VerifyConfig) -> None:
    """Checks the token files of datasets: prints each fault as it is found, at the end a summary; logs progress.

    Raises:
        DataError: there are faults, or there is nothing to check.
    """
    assert config.data_path is not None
    data = DataConfig(**{name: getattr(config, name) for name in _SHARED_SETTINGS})
    listing = list_datasets(data)
    total_bytes = sum(sum(files.sizes) for files in listing)
    progress, summary, file_count = _Progress(total_bytes), [], sum(len(files.paths) for files in listing)
    for folder in _emptied_folders(config, [files.name for files in listing]):
        progress.add(FileReport([f"{folder} has a {MANIFEST_FILE}, but its token files are gone"]))
    with showing_through(partial(print, file=sys.stderr, flush=True)):  # stdout is for what is found
        for files in listing:
            record = _read_record(files, config.vocab_size)
            for fault in (*record.faults, *_missing_files(files, record)):
                progress.add(FileReport([fault]))
            reports = []
            for report in _check_files(files, record, config.num_workers, load_format(files.file_type, data)):
                progress.add(report)
                reports.append(report)
            summary.append(_describe(files, record.vocab_size, reports))
    if progress.faults:
        raise DataError(
            f"{count_of(progress.faults, 'fault')} in {count_of(progress.faulty_files, 'file')} "
            f"({file_count:,} were read); they are listed above"
        )
    for line in summary:
        print_text(line)
    print_text(f"{count_of(file_count, 'file')}, {total_bytes / 1e9:,.2f} GB: no faults")


def check_file(
    path: str, size: int, token_format: TokenFormat, vocab_size: int | None = None, written: TokenFile | None = None
) -> FileReport:
    """Reads a token file wholly.

    Args:
        size: in bytes when it was listed.
        vocab_size: every token is below it; None = only negative tokens are faults.
        written: what `prepare` wrote, where it did.
    """
    report = FileReport()
    try:
        # By reads, before it is mapped: what the disk cannot give is an error here and not a crash.
        checksum, report.bytes = file_checksum(Path(path))
    except OSError as error:
        report.faults.append(f"{path} cannot be read: {error.strerror or error}")
        return report
    if report.bytes != size:
        report.faults.append(f"{path} has changed since it was listed: it had {size:,} bytes, now {report.bytes:,}")
    if written is not None and report.bytes != written.bytes:
        report.faults.append(f"{path} has {report.bytes:,} bytes, but `pretrain prepare` wrote {written.bytes:,}")
    elif written is not None and written.crc32 is not None:
        report.compared = True
        if checksum != written.crc32:
            report.faults.append(
                f"{path} has changed since `pretrain prepare` wrote it: its bytes have the checksum {checksum}, "
                f"not {written.crc32}"
            )
    try:
        layout = token_format.documents(path)
    except DataError as error:
        report.faults.append(str(error))
        return report
    report.documents, report.tokens = len(layout.lengths), int(layout.lengths.sum())
    report.faults += _wrong_tokens(path, layout, vocab_size)
    return report


def _check_files(
    files: DatasetFiles, record: _Record, workers: int | None, token_format: TokenFormat
) -> Iterator[FileReport]:
    """Yields the reports of a dataset's files, in their order."""

    def check(number: int) -> FileReport:
        path, name = files.path(number), files.paths[number]
        report = check_file(path, files.sizes[number], token_format, record.vocab_size, record.files.get(name))
        if record.files and name not in record.files:
            report.faults.insert(0, f"{path} was not made by `pretrain prepare`: {MANIFEST_FILE} has it not")
        return report

    with ThreadPoolExecutor(workers or min(32, os.cpu_count() or 1)) as pool:
        yield from pool.map(check, range(len(files.paths)))


def _wrong_tokens(path: str, layout: DocumentLayout, vocab_size: int | None) -> list[str]:
    """Name each row with tokens that are negative, or beyond a vocabulary that is known."""
    tokens = layout.tokens
    # As unsigned integers negative tokens are beyond all others.
    largest = np.iinfo(tokens.dtype).max
    end = largest + 1 if vocab_size is None else min(vocab_size, largest + 1)
    if end > np.iinfo(unsigned := np.dtype(f"<u{layout.width}")).max:
        return []
    tokens = tokens.view(unsigned)
    rows = np.flatnonzero(layout.lengths)
    rows = rows[np.argsort(layout.offsets[rows], kind="stable")]
    begins = layout.offsets[rows] // layout.width
    ends = begins + layout.lengths[rows]
    # Of each row, how many of its tokens are wrong, and where the first is.
    counts, firsts = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    for at in range(int(begins[0]), int(ends[-1]), _TOKENS_AT_ONCE) if len(rows) else ():
        places = at + np.flatnonzero(tokens[at : min(at + _TOKENS_AT_ONCE, int(ends[-1]))] >= end)
        owners = np.searchsorted(begins, places, side="right") - 1
        inside = places < ends[owners]  # between record batches is no document
        found, first, count = np.unique(owners[inside], return_index=True, return_counts=True)
        firsts[found] = np.where(counts[found], firsts[found], places[inside][first])
        counts[found] += count
    wrong = np.flatnonzero(counts)
    wrong = wrong[np.argsort(rows[wrong])]
    faults = [
        _wrong_token(path, layout, rows[one], firsts[one], counts[one], vocab_size) for one in wrong[:FAULTS_SHOWN]
    ]
    if len(wrong) > FAULTS_SHOWN:
        faults.append(f"{path}: {len(wrong) - FAULTS_SHOWN:,} more rows have wrong tokens")
    return faults


def _wrong_token(path: str, layout: DocumentLayout, row: int, at: int, count: int, vocab_size: int | None) -> str:
    vocabulary = "no token is negative" if vocab_size is None else f"the vocabulary is 0 to {vocab_size - 1}"
    more = f" ({count:,} such tokens in the row)" if count > 1 else ""
    position = at - int(layout.offsets[row]) // layout.width
    return (
        f"{path}, row {row}, byte {at * layout.width:,}: token {position} of the document is "
        f"{layout.tokens[at]}, but {vocabulary}{more}"
    )


def _read_record(files: DatasetFiles, vocab_size: int | None) -> _Record:
    """Reads prepare.json; nothing where there is none, a fault where it cannot be read. A given `vocab_size` wins."""
    path = Path(files.folder) / MANIFEST_FILE
    try:
        content = read_json(path)
        entries = [TokenFile(**entry) for entry in content["files"]]
        if not all(isinstance(entry.name, str) and isinstance(entry.bytes, int) for entry in entries):
            raise ValueError("a file has no name or no size")
        recorded = int(content["tokenizer"]["vocab_size"])
        return _Record({entry.name: entry for entry in entries}, recorded if vocab_size is None else vocab_size)
    except FileNotFoundError:
        return _Record({}, vocab_size)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        return _Record({}, vocab_size, (f"{path} cannot be read ({type(error).__name__}: {error})",))


def _emptied_folders(config: VerifyConfig, listed: list[str]) -> list[Path]:
    """Finds prepared datasets without any token file, where no datasets are named; a listing passes these over."""
    if config.datasets:
        return []
    assert config.data_path is not None
    folders = [path.parent for path in sorted(Path(config.data_path).expanduser().glob(f"*/{MANIFEST_FILE}"))]
    return [folder for folder in folders if folder.name not in listed and not folder.name.startswith(".")]


def _missing_files(files: DatasetFiles, record: _Record) -> list[str]:
    """Names files that were written and are gone."""
    if files.is_file:  # one of several that prepare.json names
        return []
    gone = sorted(record.files.keys() - set(files.paths))
    return [f"{files.folder}/{name} is gone, but {MANIFEST_FILE} names it" for name in gone]


def _describe(files: DatasetFiles, vocab_size: int | None, reports: list[FileReport]) -> str:
    """Describes a dataset without faults in a line."""
    vocabulary = f"all below {vocab_size:,}" if vocab_size is not None else "vocabulary not checked: give --vocab_size"
    checksums = f"no checksums in a {MANIFEST_FILE} to compare with"
    if reports and all(report.compared for report in reports):
        checksums = f"checksums as in {MANIFEST_FILE}"
    documents, tokens = sum(report.documents for report in reports), sum(report.tokens for report in reports)
    return (
        f"dataset '{files.name}': {count_of(len(reports), 'file')}, {count_of(documents, 'document')}, "
        f"{tokens:,} tokens ({vocabulary}; {checksums})"
    )


class _Progress:
    """Prints and counts faults, and logs now and then how much is read."""

    def __init__(self, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults = self.faulty_files = 0
        self._total = total_bytes
        self._clock = clock
        self._read = 0
        self._began = self._shown = clock()

    def add(self, report: FileReport) -> None:
        for fault in report.faults:
            print_text(fault)
        self.faults += len(report.faults)
        self.faulty_files += bool(report.faults)
        self._read += report.bytes
        now = self._clock()
        if now - self._shown >= LINE_INTERVAL_SECONDS:
            self._shown = now
            done, rate = self._read / max(self._total, 1), self._read / (now - self._began)
            log.info("verifying: %s", f"{done:.0%} of {self._total / 1e9:,.2f} GB, {rate / 1e6:,.0f} MB/s")
