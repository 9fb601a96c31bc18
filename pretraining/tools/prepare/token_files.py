"""Token files: documents in, Arrow IPC files out.

One row per document, one column `tokens` (list of uint16 or uint32), uncompressed, so that training maps the files into
memory and reads any document in place. A file gets its name once it is complete and on disk.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.files import file_checksum, flush_folder

COLUMN = "tokens"
BATCH_TOKENS = 1 << 21
"""Tokens per record batch: 4 or 8 MB, small enough to skip to a document, large enough that a file has few."""
LARGEST_DOCUMENT_TOKENS = 2**31 - 1 - BATCH_TOKENS
"""So that a batch that holds it stays within Arrow's 32-bit list offsets."""


@dataclass(frozen=True)
class TokenFile:
    """A finished file, with its checksum as eight hexadecimal digits; None if an older release wrote it."""

    name: str
    documents: int
    tokens: int
    bytes: int
    crc32: str | None = None


class TokenWriter:
    """Writes documents to `<prefix>000000.arrow`, `<prefix>000001.arrow`, … in a folder.

    It is a context: leaving it finishes the last file, or removes it after an error. `files` are the finished ones.

    Args:
        tokens_per_file: a file is finished once it holds this many.
    """

    def __init__(self, folder: Path, dtype: np.dtype, tokens_per_file: int, prefix: str = "part_") -> None:
        self.files: list[TokenFile] = []
        self._folder = folder
        self._tokens_per_file = tokens_per_file
        self._prefix = prefix
        self._schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])
        # Of this writer alone: a worker may outlive its killed parent for a moment.
        self._temporary = folder / f".{prefix}{secrets.token_hex(4)}.tmp"
        self._writer: pa.RecordBatchFileWriter | None = None
        self._documents = self._tokens = 0  # of the file
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_room = 0

    def write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add documents: all their tokens, [T], and the length of each, [D]."""
        while len(lengths):
            if self._writer is None:
                self._writer = pa.ipc.new_file(str(self._temporary), self._schema)
            ends, room = np.cumsum(lengths), np.cumsum(lengths + 1)  # an offset takes room too
            full_batch = np.searchsorted(room, BATCH_TOKENS - self._pending_room)
            full_file = np.searchsorted(ends, self._tokens_per_file - self._tokens)
            last = min(int(full_batch), int(full_file), len(lengths) - 1)
            self._pending.append((tokens[: ends[last]], lengths[: last + 1]))
            self._pending_room += int(room[last])
            self._documents += last + 1
            self._tokens += int(ends[last])
            tokens, lengths = tokens[ends[last] :], lengths[last + 1 :]
            if self._pending_room >= BATCH_TOKENS:
                self._flush()
            if self._tokens >= self._tokens_per_file:
                self._finish_file()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._finish_file()
        else:
            self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        """Write the pending documents as one record batch."""
        if self._pending and self._writer is not None:
            tokens, lengths = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
            offsets = np.cumsum(np.concatenate([[0], lengths]), dtype=np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))
            self._pending, self._pending_room = [], 0

    def _finish_file(self) -> None:
        """Close the current file, flush it to disk and give it its name."""
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
        self.files.append(TokenFile(name, self._documents, self._tokens, size, checksum))
        self._writer = None
        self._documents = self._tokens = 0


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest type that holds every id: uint16 up to 65536 entries, else uint32, as the library's ids."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
