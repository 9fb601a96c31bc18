"""The reader of tokens: from spans of documents to rows of a batch.

    spans of many rows --index, all at once--> file offset, tokens and batch position of each piece
                       --runs: pieces of a row that lie in one file--> one read per piece, or one read per run

Files are read straight into the batch if types agree. Threads share open files (open_files.py). Short documents that
lie near each other are copied from one read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.sampling.token_stream import Spans
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import VIRTUAL_BOS, Index
from pretraining.data.storage.open_files import OpenFile
from pretraining.data.storage.store_files import ChunkCache, ChunkCuts, ReadableChunk, StoreFile
from pretraining.data.threads import RecentlyUsed
from pretraining.errors import DataError
from pretraining.object_store import StorePath

_TYPES = {sign * width: np.dtype(f"<{kind}{width}") for width in (1, 2, 4, 8) for sign, kind in ((1, "u"), (-1, "i"))}
"""Integer types by their bytes; negative = sign-extended."""
_STRETCH_BYTES_PER_PIECE = 4096
"""Bytes per piece up to which one read of a run is cheaper than one read per piece."""

OpenFiles = RecentlyUsed[OpenFile | StoreFile]

Fetch = Callable[[], object]
"""Makes a chunk ready."""


@dataclass(frozen=True)
class _Pieces:
    """Stored tokens to copy, [n] int64 each: `counts` from byte `offsets` of `files` to `positions` of the batch."""

    files: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    positions: np.ndarray


class DocumentReader:
    """A reader of a dataset's documents, which refuses tokens from `vocab_size` on."""

    def __init__(
        self,
        files: DatasetFiles,
        index: Index,
        config: DataConfig,
        vocab_size: int,
        opened: OpenFiles,
        chunks: ChunkCache | None = None,
    ) -> None:
        if files.is_remote:
            assert chunks is not None, "objects are read through a cache"
            self._chunks, self._cuts = chunks, ChunkCuts(index, files.sizes)
        self._files = files
        self._index = index
        self._bos_token, self._sep_token = config.bos, config.sep
        self._vocab_size = vocab_size
        self._opened = opened
        # A virtual token may be wider than the stored ones: 999 may end documents of one-byte tokens.
        largest = max(config.bos or 0, config.sep or 0)
        # Sign extension into wide enough integers turns a negative token into one outside the vocabulary.
        is_narrow = index.is_signed & (vocab_size > 2.0 ** (8 * index.token_bytes - 1))
        widths = np.where(is_narrow, 4, index.token_bytes)
        self._token_bytes = max(int(widths.max(initial=1)), np.min_scalar_type(largest).itemsize)
        is_extended = index.is_signed & (index.token_bytes < self._token_bytes)
        self._types = np.where(is_extended, -index.token_bytes, index.token_bytes)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples (`Samples.read`).

        `target` is contiguous, of an integer type for all ids of the vocabulary.
        """
        target = target.view(f"u{target.itemsize}")
        # Tokens of another width than the batch are checked before the conversion.
        narrowed = target.itemsize != self._token_bytes
        wide = np.empty((len(rows), target.shape[1]), dtype=f"u{self._token_bytes}") if narrowed else target
        wide_rows = np.arange(len(rows)) if narrowed else rows

        filled = spans.row_tokens
        for row in np.flatnonzero(filled < target.shape[1]):
            wide[wide_rows[row], filled[row] :] = 0
        positions = spans.positions(wide_rows * target.shape[1])
        self._copy(spans, positions, wide.reshape(-1))
        content = wide if narrowed else wide[wide_rows]
        if len(content) and int(content.max()) >= self._vocab_size:
            self._raise_beyond_vocabulary(spans, positions, wide.reshape(-1))
        if narrowed:
            target[rows] = wide

    def _copy(self, spans: Spans, positions: np.ndarray, target: np.ndarray) -> None:
        """Copy the spans to their positions in the flat `target`, which is as wide as the widest tokens."""
        documents = self._index.documents_at(spans.documents)
        files = self._index.files_of(spans.documents)
        ends = spans.starts + spans.lengths
        # Stored tokens of a document are numbered from 0, or from 1 after a virtual bos_token.
        first = ((documents["flags"] & VIRTUAL_BOS) != 0).astype(np.int64)
        begins = np.maximum(spans.starts - first, 0)
        counts = np.minimum(ends - first, documents["tokens"].astype(np.int64)) - begins
        offsets = documents["offset"].astype(np.int64) + begins * self._index.token_bytes[files]
        has_bos = spans.starts < first
        stored = counts > 0  # a span may be a virtual token alone, also behind the last byte of its file
        pieces = _Pieces(files[stored], offsets[stored], counts[stored], (positions + has_bos)[stored])
        self._copy_stored(pieces, spans.rows[stored], target)
        if self._bos_token is not None:
            target[positions[has_bos]] = self._bos_token
        if self._sep_token is not None:
            target[(positions + spans.lengths - 1)[has_bos + counts < spans.lengths]] = self._sep_token

    def _copy_stored(self, pieces: _Pieces, rows: np.ndarray, target: np.ndarray) -> None:
        """Copy run by run. A run consists of consecutive pieces of a row that lie in one file."""
        if not len(rows):
            return
        begins_run = np.concatenate(([True], (np.diff(rows) != 0) | (np.diff(pieces.files) != 0)))
        firsts = np.flatnonzero(begins_run)
        lasts = np.append(firsts[1:], len(rows))
        files = pieces.files[firsts]
        lows = np.minimum.reduceat(pieces.offsets, firsts)
        highs = np.maximum.reduceat(pieces.offsets + pieces.counts * self._index.token_bytes[pieces.files], firsts)
        stretches = highs - lows
        at_once = (lasts - firsts > 1) & (stretches > 0) & (stretches <= (lasts - firsts) * _STRETCH_BYTES_PER_PIECE)
        scratch = np.empty(int(stretches[at_once].max(initial=0)), dtype=np.uint8)
        columns = (column.tolist() for column in (firsts, lasts, files, self._types[files], lows, highs, at_once))
        file, opened = -1, None
        for first, last, number, kind, low, high, is_stretch in zip(*columns, strict=True):
            if opened is None or number != file:
                file, opened = number, self._file(number)
            part = opened.part(low, high)
            if is_stretch:
                stretch = scratch[: high - low]
                part.read_into(stretch.data, low)
                _gather(stretch.view(_TYPES[kind]), low, pieces, slice(first, last), target)
            else:
                _read_singly(part, _TYPES[kind], pieces, slice(first, last), target)

    def fetches(self, spans: Spans) -> Iterator[Fetch]:
        """Yield what fetches each chunk that holds a part of the spans and is missing; the files are in a store."""
        documents, files = self._index.documents_at(spans.documents), self._index.files_of(spans.documents)
        begins, stored = documents["offset"].astype(np.int64), documents["tokens"] > 0
        ends = begins + documents["tokens"] * self._index.token_bytes[files]
        now, previous = monotonic(), -1
        for number, chunk in self._cuts.chunks_of(files[stored], begins[stored], ends[stored]):
            if number != previous:
                file, previous = self._file(number), number
            assert isinstance(file, StoreFile)
            if not self._chunks.use(file.keys[chunk], now):
                yield partial(file.chunk, chunk)

    def _file(self, number: int) -> OpenFile | StoreFile:
        return self._opened.get(self._files.path(number), partial(self._open, number))

    def _open(self, number: int) -> OpenFile | StoreFile:
        files, size = self._files, self._files.sizes[number]
        if not files.is_remote:
            return OpenFile(files.path(number), size, files.ending)
        place = files.place(number)
        assert isinstance(place, StorePath)
        return StoreFile(place, size, files.times[number], self._cuts.of_file(number), self._chunks)

    def _raise_beyond_vocabulary(self, spans: Spans, positions: np.ndarray, target: np.ndarray) -> None:
        wrong = target >= self._vocab_size
        # Find the first piece with such a token: rows outside the spans may hold anything.
        counts = np.concatenate(([0], np.cumsum(wrong)))
        span = int(np.flatnonzero(counts[positions + spans.lengths] > counts[positions])[0])
        position = int(np.flatnonzero(wrong[positions[span] :])[0])
        number, row = self._index.locate(int(spans.documents[span]))
        token = int(target[positions[span] + position])
        if self._index.is_signed[number] and token >> 8 * target.itemsize - 1:
            token -= 1 << 8 * target.itemsize
        raise DataError(
            f"token {int(spans.starts[span]) + position} of the document is {token}, but the vocabulary is 0 to "
            f"{self._vocab_size - 1}: the files are damaged, or --vocab_size is not that of their tokenizer",
            path=self._files.path(number),
            row=row,
        )


def _read_singly(file: ReadableChunk, dtype: np.dtype[Any], pieces: _Pieces, run: slice, target: np.ndarray) -> None:
    """Read each piece of a run separately."""
    itemsize = target.itemsize
    content = target.data.cast("B")
    columns = (column[run].tolist() for column in (pieces.offsets, pieces.counts, pieces.positions))
    for offset, count, position in zip(*columns, strict=True):
        if dtype.itemsize == itemsize:
            file.read_into(content[position * itemsize : (position + count) * itemsize], offset)
        else:
            tokens = np.empty(count, dtype=dtype)
            file.read_into(tokens.data.cast("B"), offset)
            target[position : position + count] = tokens


def _gather(stretch: np.ndarray, begin: int, pieces: _Pieces, run: slice, target: np.ndarray) -> None:
    """Copy the pieces of a run out of the stretch of the file that holds them, which starts at byte `begin`."""
    targets, last = pieces.positions[run], int(pieces.counts[run.stop - 1])
    sources = (pieces.offsets[run] - begin) // stretch.itemsize
    # Positions of virtual tokens between pieces get arbitrary tokens here; the caller overwrites them.
    indices = np.repeat(sources - targets, np.append(np.diff(targets), last))
    first, end = int(targets[0]), int(targets[-1]) + last
    indices += np.arange(first, end)
    if stretch.dtype == target.dtype:
        np.take(stretch, indices, out=target[first:end], mode="clip")
    else:
        target[first:end] = np.take(stretch, indices, mode="clip")
