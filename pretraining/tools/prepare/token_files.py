"""Token files: documents in, Arrow IPC files out.

One row a document, one column `tokens` (list of uint16 or uint32), uncompressed, so that training maps the files into
memory and reads any document in place. A file gets its name once it is complete and on disk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.files import file_checksum, flush_folder

COLUMN = "tokens"
BATCH_TOKENS = 1 << 21
"""Tokens a record batch: 4 or 8 MB, small enough to skip to a document, large enough that a file has few."""
LARGEST_DOCUMENT_TOKENS = 2**31 - 1 - BATCH_TOKENS
"""So that a batch that holds it stays within Arrow's 32-bit list offsets."""


@dataclass
class Counts:
    """How much was read and written.

    Attributes:
        empty_documents: without any text; they are not written.
        characters, text_bytes: of the text encoded; the bytes in UTF-8.
        input_bytes: on disk, read for it.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    characters: int = 0
    text_bytes: int = 0
    input_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class TokenRows:
    """R rows of T tokens in all: documents, or pieces of documents.

    Attributes:
        tokens: of all rows, one after the other, [T].
        lengths: tokens of each row, [R] int64; 0 where there was no text.
        read: what was read for each, [R, 3] int64: characters, bytes of text in UTF-8, bytes on disk.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    read: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, count: int) -> tuple[TokenRows, TokenRows]:
        """The first `count` rows, and the others."""
        at = int(self.lengths[:count].sum())
        return (
            TokenRows(self.tokens[:at], self.lengths[:count], self.read[:count]),
            TokenRows(self.tokens[at:], self.lengths[count:], self.read[count:]),
        )

    @staticmethod
    def concatenate(parts: Sequence[TokenRows]) -> TokenRows:
        """The rows of some parts, at least one, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return TokenRows(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.read for part in parts]),
        )

    def joined(self, ends: np.ndarray) -> TokenRows:
        """The same tokens in longer rows, which end behind these rows; the last end is the number of rows."""
        starts = np.concatenate([[0], ends[:-1]])
        return TokenRows(self.tokens, np.add.reduceat(self.lengths, starts), np.add.reduceat(self.read, starts))

    def counts(self) -> Counts:
        """How much they are, where each row is a document."""
        empty = int((self.lengths == 0).sum())
        characters, text_bytes, input_bytes = (int(total) for total in self.read.sum(axis=0))
        return Counts(len(self) - empty, len(self.tokens), empty, characters, text_bytes, input_bytes)


@dataclass(frozen=True)
class TokenFile:
    """A finished file, with its checksum as eight hexadecimal digits; None where an older release wrote it."""

    name: str
    documents: int
    tokens: int
    bytes: int
    crc32: str | None = None


class TokenWriter:
    """Writes documents to `<prefix>000000.arrow`, `<prefix>000001.arrow`, … in a folder.

    It is a context: leaving it finishes the last file, or removes it after an error.

    Args:
        tokens_per_file: a file is finished once it holds this many.
        files: finished earlier, with the same prefix; those finished here are added to the list.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        tokens_per_file: int,
        prefix: str = "part_",
        files: list[TokenFile] | None = None,
    ) -> None:
        self.files: list[TokenFile] = [] if files is None else files
        self._folder = folder
        self._dtype = dtype
        self._tokens_per_file = tokens_per_file
        self._prefix = prefix
        self._schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])
        # Of this writer alone: a worker may outlive its killed parent for a moment.
        self._temporary = folder / f".{prefix}{secrets.token_hex(4)}.tmp"
        self._writer: pa.RecordBatchFileWriter | None = None
        self._file_documents = self._file_tokens = 0
        self._pending: list[np.ndarray] = []
        self._pending_lengths: list[np.ndarray] = []
        self._pending_room = 0

    def documents_to_end(self, lengths: np.ndarray) -> int:
        """How many of the next documents, of these lengths, go into the file that is being written."""
        return int(np.searchsorted(np.cumsum(lengths), self._tokens_per_file - self._file_tokens)) + 1

    def write(self, tokens: np.ndarray, lengths: np.ndarray) -> bool:
        """Adds documents, with all tokens [T] of the writer's type and the length of each, [D].

        They must be no more than `documents_to_end` says.

        Returns:
            whether this finished a file.
        """
        assert tokens.dtype == self._dtype and lengths.sum() == len(tokens)
        if self._writer is None and len(lengths):
            self._writer = pa.ipc.new_file(str(self._temporary), self._schema)
        self._file_documents += len(lengths)
        self._file_tokens += len(tokens)
        while len(lengths):
            room = np.cumsum(lengths + 1)  # empty documents take room too, if only their offset
            count = min(int(np.searchsorted(room, BATCH_TOKENS - self._pending_room)) + 1, len(lengths))
            at = int(lengths[:count].sum())
            self._pending.append(tokens[:at])
            self._pending_lengths.append(lengths[:count])
            self._pending_room += int(room[count - 1])
            if self._pending_room >= BATCH_TOKENS:
                self._flush()
            tokens, lengths = tokens[at:], lengths[count:]
        if self._file_tokens < self._tokens_per_file:
            return False
        self._finish_file()
        return True

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._finish_file()
        else:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        """Writes the pending documents as one record batch."""
        if not self._pending or self._writer is None:
            return
        offsets = np.cumsum(np.concatenate([[0], *self._pending_lengths]), dtype=np.int32)
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self._pending)))
        self._writer.write_batch(pa.record_batch([column], schema=self._schema))
        self._pending, self._pending_lengths, self._pending_room = [], [], 0

    def _finish_file(self) -> None:
        """Closes the current file, flushes it to disk and gives it its name."""
        if self._writer is None:
            return
        self._flush()
        self._writer.close()
        with self._temporary.open("rb+") as written:
            os.fsync(written.fileno())
        checksum, size = file_checksum(self._temporary)
        name = f"{self._prefix}{len(self.files):06d}.arrow"
        self._temporary.replace(self._folder / name)
        flush_folder(self._folder)
        self.files.append(TokenFile(name, self._file_documents, self._file_tokens, size, checksum))
        self._writer = None
        self._file_documents = self._file_tokens = 0


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds every id: uint16 up to 65536 entries, else uint32, as the library's own ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
