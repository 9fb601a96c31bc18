"""Writer of token files: Arrow IPC files with a document per row.

The files have one column `tokens` (list of uint16 or uint32), uncompressed, so training can map them into memory and
read any document in place. A file is renamed to its final name when it is complete and on disk.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.config.training import DataConfig
from pretraining.data.storage.arrow import ArrowFormat
from pretraining.data.storage.document_records import write_record
from pretraining.files import file_checksum, flush_folder

COLUMN = "tokens"
BATCH_TOKENS = 1 << 21
"""Tokens of a record batch: 4 or 8 MB, so that a file has few batches."""
LARGEST_DOCUMENT_TOKENS = 2**31 - 1 - BATCH_TOKENS
"""Limit that keeps a batch within Arrow's 32-bit list offsets."""


@dataclass(frozen=True)
class TokenFile:
    """A finished file; crc32 has eight hexadecimal digits."""

    name: str
    documents: int
    tokens: int
    bytes: int
    crc32: str


class TokenWriter:
    """A writer of documents to `<prefix>000000.arrow`, `<prefix>000001.arrow`, … in a folder.

    Leaving its `with` block finishes the last file, or deletes it after an error. `files` lists the finished files.

    Args:
        tokens_per_file: size at which a file is finished.
    """

    def __init__(self, folder: Path, dtype: np.dtype, tokens_per_file: int, prefix: str = "part_") -> None:
        self.files: list[TokenFile] = []
        self._folder = folder
        self._tokens_per_file = tokens_per_file
        self._prefix = prefix
        self._schema = pa.schema([(COLUMN, pa.list_(pa.from_numpy_dtype(dtype)))])
        # A random name, because a worker may outlive its killed parent for a moment.
        self._temporary = folder / f".{prefix}{secrets.token_hex(4)}.tmp"
        self._writer: pa.RecordBatchFileWriter | None = None
        self._documents = self._tokens = 0  # in the current file
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._pending_room = 0

    def write(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Add documents: their concatenated tokens [T] and their lengths [D]."""
        while len(lengths):
            if self._writer is None:
                self._writer = pa.ipc.new_file(str(self._temporary), self._schema)
            ends, room = np.cumsum(lengths), np.cumsum(lengths + 1)  # an offset counts as a token
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
        """Close the current file, flush it to disk and rename it."""
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
        layout = ArrowFormat(DataConfig(col_name=COLUMN)).documents(str(self._folder / name))
        write_record(self._folder / name, layout, f"arrow {COLUMN}")
        self.files.append(TokenFile(name, self._documents, self._tokens, size, checksum))
        self._writer = None
        self._documents = self._tokens = 0


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest type for all ids: uint16 up to 65536 entries, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
