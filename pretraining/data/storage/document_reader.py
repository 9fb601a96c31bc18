"""Tokens from files: spans of documents to rows of a batch.

    spans of many rows --index, all at once--> offset, tokens and place of each piece
                       --runs: pieces of a row that lie in one file--> read piece by piece, or as one stretch

Files are read by position (`preadv`), straight into the batch where types agree, and never mapped: a truncated file is
an error and not a crash, and any number of threads can share a file. A bounded number of files is open at a time. Short
documents that lie near each other are gathered from a stretch that is read at once.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.sampling.token_stream import Spans
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import VIRTUAL_BOS, Index
from pretraining.data.storage.token_format import TokenFormat, load_format
from pretraining.data.threads import RecentlyUsed
from pretraining.errors import DataError
from pretraining.files import check_regular

_TYPES = {sign * width: np.dtype(f"<{kind}{width}") for width in (1, 2, 4, 8) for sign, kind in ((1, "u"), (-1, "i"))}
"""Integers by their bytes, negative where the sign is extended."""
_STRETCH_BYTES_A_SPAN = 4096
"""Unwanted bytes whose reading costs about as much as a read of its own."""


class OpenFile:
    """A file that is open for reading by position; closed when the last user lets go of it."""

    def __init__(self, path: str, size: int, token_format: TokenFormat) -> None:
        """Open a token file; a DataError where it is gone, has another size, or does not end as its format does."""
        self._descriptor = -1
        self.path = path
        try:
            check_regular(path)
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            found = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise DataError(f"cannot be opened: {error.strerror}", path=path) from error
        if found != size:
            raise DataError(f"changed since the job began: it had {size:,} bytes and now has {found:,}", path=path)
        tail = bytearray(len(token_format.ending))
        self.read_into(memoryview(tail), size - len(tail))
        if tail != token_format.ending:
            raise DataError(f"damaged: it does not end as {token_format.title} does", path=path)

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file; a DataError where it cannot be read, or ends before."""
        while len(target):
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise DataError(f"cannot be read at byte {offset:,}: {error.strerror}", path=self.path) from error
            if count == 0:
                end = os.fstat(self._descriptor).st_size  # which may lie before the place that was asked for
                raise DataError(f"truncated: it ends at byte {end:,}, before its documents do", path=self.path)
            target, offset = target[count:], offset + count

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The default keeps the function: when a program ends, the module may be emptied before the last file goes.
        if self._descriptor >= 0:
            close(self._descriptor)


OpenFiles = RecentlyUsed[OpenFile]


def open_files(limit: int | None = None) -> OpenFiles:
    """Make a bounded set of open files: without a limit half of what the process may open, at most 4096."""
    if limit is None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 2))
    return RecentlyUsed(limit, cost=lambda _: 1)


@dataclass(frozen=True)
class _Pieces:
    """Stored tokens to copy, [n] int64 each: `counts` from byte `offsets` of `files` to `places` in the flat batch."""

    files: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    places: np.ndarray


class DocumentReader:
    """Reads the tokens of a dataset's documents, all of which are below `vocab_size`."""

    def __init__(
        self, files: DatasetFiles, index: Index, config: DataConfig, vocab_size: int, opened: OpenFiles
    ) -> None:
        self._files = files
        self._format = load_format(files.file_type, config)
        self._index = index
        self._bos_token, self._sep_token = config.bos_token, config.sep_token
        self._vocab_size = vocab_size
        self._opened = opened
        # Virtual tokens need not fit into what files are as narrow as: 999 ends documents of single bytes, too.
        largest = max(config.bos_token or 0, config.sep_token or 0)
        # A negative token becomes one beyond the vocabulary: its sign is extended into integers that are wide enough.
        is_narrow = index.is_signed & (vocab_size > 2.0 ** (8 * index.token_bytes - 1))
        widths = np.where(is_narrow, 4, index.token_bytes)
        self._token_bytes = max(int(widths.max(initial=1)), np.min_scalar_type(largest).itemsize)
        is_extended = index.is_signed & (index.token_bytes < self._token_bytes)
        self._types = np.where(is_extended, -index.token_bytes, index.token_bytes)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples (`Samples.read`).

        `target` is contiguous, of an integer type that holds every id of the vocabulary.
        """
        target = target.view(f"u{target.itemsize}")
        # Where files are wider than the batch, tokens are checked before they are narrowed.
        narrowed = target.itemsize != self._token_bytes
        wide = np.empty((len(rows), target.shape[1]), dtype=f"u{self._token_bytes}") if narrowed else target
        wide_rows = np.arange(len(rows)) if narrowed else rows

        filled = spans.row_tokens
        for row in np.flatnonzero(filled < target.shape[1]):
            wide[wide_rows[row], filled[row] :] = 0
        places = spans.places(wide_rows * target.shape[1])
        self._copy(spans, places, wide.reshape(-1))
        content = wide if narrowed else wide[wide_rows]
        if len(content) and int(content.max()) >= self._vocab_size:
            self._raise_beyond_vocabulary(spans, places, wide.reshape(-1))
        if narrowed:
            target[rows] = wide

    def _copy(self, spans: Spans, places: np.ndarray, target: np.ndarray) -> None:
        """Bring the spans, each to its place, into the flat `target`, which is as wide as the widest file."""
        documents = self._index.documents_at(spans.documents)
        files = self._index.files_of(spans.documents)
        ends = spans.starts + spans.lengths
        # Stored tokens of a document are numbered from 0, or from 1 where a virtual one is in front of them.
        first = ((documents["flags"] & VIRTUAL_BOS) != 0).astype(np.int64)
        begins = np.maximum(spans.starts - first, 0)
        counts = np.minimum(ends - first, documents["tokens"].astype(np.int64)) - begins
        offsets = documents["offset"].astype(np.int64) + begins * self._index.token_bytes[files]
        has_bos = spans.starts < first
        self._copy_stored(_Pieces(files, offsets, counts, places + has_bos), spans.rows, target)
        if self._bos_token is not None:
            target[places[has_bos]] = self._bos_token
        if self._sep_token is not None:
            target[(places + spans.lengths - 1)[has_bos + counts < spans.lengths]] = self._sep_token

    def _copy_stored(self, pieces: _Pieces, rows: np.ndarray, target: np.ndarray) -> None:
        """Read run by run: pieces of a row that follow each other and lie in one file."""
        if not len(rows):
            return
        begins_run = np.concatenate(([True], (np.diff(rows) != 0) | (np.diff(pieces.files) != 0)))
        firsts = np.flatnonzero(begins_run)
        lasts = np.append(firsts[1:], len(rows))
        files = pieces.files[firsts]
        lows = np.minimum.reduceat(pieces.offsets, firsts)
        highs = np.maximum.reduceat(pieces.offsets + pieces.counts * self._index.token_bytes[pieces.files], firsts)
        stretches = highs - lows
        at_once = (lasts - firsts > 1) & (stretches > 0) & (stretches <= (lasts - firsts) * _STRETCH_BYTES_A_SPAN)
        scratch = np.empty(int(stretches[at_once].max(initial=0)), dtype=np.uint8)
        columns = (column.tolist() for column in (firsts, lasts, files, self._types[files], lows, highs, at_once))
        file, opened = -1, None
        for first, last, number, kind, low, high, is_stretch in zip(*columns, strict=True):
            if opened is None or number != file:
                file, opened = number, self._file(number)
            if is_stretch:
                stretch = scratch[: high - low]
                opened.read_into(stretch.data, low)
                _gather(stretch.view(_TYPES[kind]), low, pieces, slice(first, last), target)
            else:
                _read_singly(opened, _TYPES[kind], pieces, slice(first, last), target)

    def _file(self, number: int) -> OpenFile:
        path = self._files.path(number)
        return self._opened.get(path, lambda: OpenFile(path, self._files.sizes[number], self._format))

    def _raise_beyond_vocabulary(self, spans: Spans, places: np.ndarray, target: np.ndarray) -> None:
        wrong = target >= self._vocab_size
        # The first piece with such a token; other rows of the batch may hold anything.
        counts = np.concatenate(([0], np.cumsum(wrong)))
        span = int(np.flatnonzero(counts[places + spans.lengths] > counts[places])[0])
        position = int(np.flatnonzero(wrong[places[span] :])[0])
        number, row = self._index.place(int(spans.documents[span]))
        token = int(target[places[span] + position])
        if self._index.is_signed[number] and token >> 8 * target.itemsize - 1:
            token -= 1 << 8 * target.itemsize
        raise DataError(
            f"token {int(spans.starts[span]) + position} of the document is {token}, but the vocabulary is 0 to "
            f"{self._vocab_size - 1}: the files are made with another tokenizer (see --vocab_size), or damaged",
            path=self._files.path(number),
            row=row,
        )


def _read_singly(file: OpenFile, dtype: np.dtype[Any], pieces: _Pieces, run: slice, target: np.ndarray) -> None:
    """Read the pieces of a run, each by itself."""
    itemsize = target.itemsize
    content = target.data.cast("B")
    columns = (column[run].tolist() for column in (pieces.offsets, pieces.counts, pieces.places))
    for offset, count, place in zip(*columns, strict=True):
        if dtype.itemsize == itemsize:
            file.read_into(content[place * itemsize : (place + count) * itemsize], offset)
        else:
            tokens = np.empty(count, dtype=dtype)
            file.read_into(tokens.data.cast("B"), offset)
            target[place : place + count] = tokens


def _gather(stretch: np.ndarray, begin: int, pieces: _Pieces, run: slice, target: np.ndarray) -> None:
    """Copy the pieces of a run out of the stretch of the file, from byte `begin`, that holds them."""
    places, last = pieces.places[run], int(pieces.counts[run.stop - 1])
    sources = (pieces.offsets[run] - begin) // stretch.itemsize
    # Between pieces are places of virtual tokens: whatever is brought there, and be it from beyond the stretch, they
    # are written over.
    positions = np.repeat(sources - places, np.append(np.diff(places), last))
    first, end = int(places[0]), int(places[-1]) + last
    positions += np.arange(first, end)
    if stretch.dtype == target.dtype:
        np.take(stretch, positions, out=target[first:end], mode="clip")
    else:
        target[first:end] = np.take(stretch, positions, mode="clip")
