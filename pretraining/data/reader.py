"""Tokens from files: spans of documents to a row of a batch.

Files are read by position (`preadv`), straight into the row where types agree, and never mapped: a truncated file or a
failing disk is an error that names file and row, not a crash, memory stays flat, and any number of threads can share a
file. A bounded number of files is open at a time. Where a sample is made of many short documents of one stretch of a
file, the stretch is read at once and the documents are gathered from it.
"""

from __future__ import annotations

import os
import resource

import numpy as np

from pretraining.data.arrow_metadata import MAGIC
from pretraining.data.cache import RecentlyUsed
from pretraining.data.files import DatasetFiles
from pretraining.data.index import Index
from pretraining.data.streams import Spans
from pretraining.errors import DataError

_STRETCH_BYTES_A_SPAN = 4096
"""Reading so many unwanted bytes costs about as much as a read of its own."""


class OpenFile:
    """A file that is open for reading by position; closed when the last user lets go of it."""

    def __init__(self, path: str, size: int) -> None:
        """Open a token file and check that it is still the one that was listed.

        Raises:
            DataError: it is gone, has another size, or no longer ends as an Arrow file does.
        """
        self._descriptor = -1
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            found = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise DataError(f"cannot open {path}: {error.strerror}") from error
        if found != size:
            raise DataError(f"{path} has changed since the job began: it had {size:,} bytes and now has {found:,}")
        tail = bytearray(len(MAGIC))
        self.read_into(memoryview(tail), size - len(MAGIC))
        if tail != MAGIC:
            raise DataError(f"{path} is damaged: it does not end as an Arrow file does")

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` (bytes) from a position of the file.

        Raises:
            DataError: the file cannot be read, or ends before.
        """
        while len(target):
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise DataError(f"cannot read {self.path} at byte {offset:,}: {error.strerror}") from error
            if count == 0:
                raise DataError(f"{self.path} ends at byte {offset:,}, before its documents do: it was truncated")
            target, offset = target[count:], offset + count

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


OpenFiles = RecentlyUsed[OpenFile]


def open_files(limit: int | None = None) -> OpenFiles:
    """A bounded set of open files, to be shared by all the readers of a process.

    Args:
        limit: how many; None = half of what the process may open, at most 4096.
    """
    if limit is None:
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = 4096 if allowed == resource.RLIM_INFINITY else max(16, min(4096, allowed // 2))
    return RecentlyUsed(limit, cost=lambda _: 1)


class DocumentReader:
    """Reads the tokens of a dataset's documents.

    Args:
        files: the dataset.
        index: of these files.
        sep_token: the virtual token that the index counts; None = none.
        vocab_size: every token is below it.
        opened: files that are open.
    """

    def __init__(
        self, files: DatasetFiles, index: Index, sep_token: int | None, vocab_size: int, opened: OpenFiles
    ) -> None:
        self._files = files
        self._index = index
        self._sep_token = sep_token
        self._vocab_size = vocab_size
        self._opened = opened
        self._token_bytes = int(index.token_bytes.max(initial=1))

    def read(self, spans: Spans, row: np.ndarray) -> None:
        """Fill a row with the tokens of spans.

        Args:
            spans: as many tokens as the row has.
            row: [T] of an integer type that holds every id of the vocabulary.

        Raises:
            DataError: a file cannot be read, or holds a token beyond the vocabulary; names file and row.
        """
        row = row.view(f"u{row.itemsize}")
        # Where files are wider than the row, tokens are checked before they are narrowed.
        target = row if row.itemsize == self._token_bytes else np.empty(len(row), dtype=f"u{self._token_bytes}")
        places = np.cumsum(spans.lengths) - spans.lengths
        self._copy(spans, places, target)
        largest = int(target.max())
        if largest >= self._vocab_size:
            self._raise_beyond_vocabulary(spans, places, target)
        if target is not row:
            row[:] = target

    def _copy(self, spans: Spans, places: np.ndarray, target: np.ndarray) -> None:
        """Bring the spans, each to its place, into `target`, which is as wide as the widest file."""
        documents = self._index.documents[spans.documents]
        stored = documents["tokens"].astype(np.int64)
        counts = np.minimum(spans.lengths, stored - spans.starts)
        numbers = self._index.files_of(spans.documents)
        widths = self._index.token_bytes[numbers]
        offsets = documents["offset"].astype(np.int64) + spans.starts * widths

        one_file = numbers[0] == numbers[-1] and bool((numbers == numbers[0]).all())
        begin, end = int(offsets.min()), int((offsets + counts * widths).max())
        if one_file and len(counts) > 1 and begin < end <= begin + len(counts) * _STRETCH_BYTES_A_SPAN:
            stretch = np.empty((end - begin) // int(widths[0]), dtype=f"u{widths[0]}")
            self._file(int(numbers[0])).read_into(stretch.data.cast("B"), begin)
            positions = np.repeat((offsets - begin) // widths - places, spans.lengths)
            positions += np.arange(len(positions))
            # A virtual token's position may lie one past the stretch; what stands there is written over below.
            if widths[0] == target.itemsize:
                np.take(stretch, positions, out=target, mode="clip")
            else:
                target[:] = np.take(stretch, positions, mode="clip")
        else:
            self._copy_singly(numbers, offsets, widths, counts, places, target)
        if self._sep_token is not None:
            target[(places + spans.lengths - 1)[counts < spans.lengths]] = self._sep_token

    def _copy_singly(
        self,
        numbers: np.ndarray,
        offsets: np.ndarray,
        widths: np.ndarray,
        counts: np.ndarray,
        places: np.ndarray,
        target: np.ndarray,
    ) -> None:
        """Read document by document."""
        content = target.data.cast("B")
        itemsize = target.itemsize
        columns = (column.tolist() for column in (numbers, offsets, widths, counts, places))
        last, file = -1, None
        for number, offset, width, count, place in zip(*columns, strict=True):
            if count == 0:
                continue
            if file is None or number != last:
                last, file = number, self._file(number)
            if width == itemsize:
                file.read_into(content[place * itemsize : (place + count) * itemsize], offset)
            else:
                tokens = np.empty(count, dtype=f"u{width}")
                file.read_into(tokens.data.cast("B"), offset)
                target[place : place + count] = tokens

    def _file(self, number: int) -> OpenFile:
        path = self._files.path(number)
        return self._opened.get(path, lambda: OpenFile(path, self._files.sizes[number]))

    def _raise_beyond_vocabulary(self, spans: Spans, places: np.ndarray, target: np.ndarray) -> None:
        at = int(np.argmax(target >= self._vocab_size))
        span = int(np.searchsorted(places, at, side="right")) - 1
        number, row = self._index.place(int(spans.documents[span]))
        position = int(spans.starts[span]) + at - int(places[span])
        token = int(target[at])
        bits = 8 * int(self._index.token_bytes[number])
        if bits >= 32 and token >> bits - 1:  # no vocabulary reaches there: a negative number was meant
            token -= 1 << bits
        raise DataError(
            f"{self._files.path(number)}, row {row}: token {position} of the document is {token}, but the vocabulary "
            f"ends at {self._vocab_size - 1}: the files are made with another tokenizer (see --vocab_size), or damaged"
        )
