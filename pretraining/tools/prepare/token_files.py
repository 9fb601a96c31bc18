"""Token files: documents in, Arrow IPC files out.

One row a document, one column `tokens` (list of uint16 or uint32), uncompressed, so that training maps the files into
memory and reads any document in place. A file gets its name once it is complete and on disk.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.files import file_checksum, flush_folder

MANIFEST_FILE = "prepare.json"
"""Says what a folder of token files holds; a folder that has it is complete."""
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

    def add_input(self, content: str | np.ndarray, bytes_read: int) -> None:
        """Counts a piece of the input; of token ids there is no text."""
        self.input_bytes += bytes_read
        if isinstance(content, str):
            self.characters += len(content)
            self.text_bytes += len(content) if content.isascii() else len(content.encode("utf-8"))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


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
        self._pending_tokens = 0

    def write(self, tokens: np.ndarray) -> bool:
        """Adds a document, ids [T] of the writer's type; returns whether this finished a file."""
        assert len(tokens) <= LARGEST_DOCUMENT_TOKENS and tokens.dtype == self._dtype
        if self._writer is None:
            self._writer = pa.ipc.new_file(str(self._temporary), self._schema)
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        self._file_documents += 1
        self._file_tokens += len(tokens)
        # Empty documents take room too, if only their offset.
        if self._pending_tokens + len(self._pending) >= BATCH_TOKENS:
            self._flush()
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
        offsets = np.zeros(len(self._pending) + 1, dtype=np.int32)
        np.cumsum([len(document) for document in self._pending], out=offsets[1:])
        column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(self._pending)))
        self._writer.write_batch(pa.record_batch([column], schema=self._schema))
        self._pending, self._pending_tokens = [], 0

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
