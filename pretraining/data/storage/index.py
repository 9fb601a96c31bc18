"""The index of a dataset: offset and length of every document, in one file that processes map into memory.

    documents   n of (byte offset of the first token, tokens, flags)        n * 16 bytes
    files       number of each file's first document, and bytes per token,  (files + 1) * 16 bytes
                negative for signed types
    bounds      tokens before each block of `BLOCK_DOCUMENTS` documents, per split
    checksums   CRC-32 of each block of documents                           blocks * 4 bytes
    records     record of each file's content (content.py)                  files * 8 bytes
    names       JSON: path -> bytes of every file, only used to describe changes
    header      JSON: digests of settings and files, and offsets of the parts above
    trailer     length of the documents and of the header, CRC-32 of all between documents and trailer, magic number

Documents are numbered canonically: files by sorted path, rows in order. A hash of (dataset, path, row) selects the
held-out documents, so new files or rows move no other document. In one split, documents of the other are empty.
Virtual tokens (bos_token, sep_token) are not stored: they count in lengths, and the reader adds them. A document
without stored tokens has length 0 and no virtual tokens.

An index is valid for one listing, one content of its files and one `settings_digest`. It is checked completely when it
is opened; `index_folder.py` rebuilds a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.token_format import load_format
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import parse_json
from pretraining.launch.machine import usable_cores

BLOCK_DOCUMENTS = 1024
"""Documents per block, a power of two. Documents are shuffled inside blocks."""
SPLITS = ("train", "held_out")

_BLOCKS_AT_ONCE = 1024
"""Blocks per task of a checking thread."""
_BLOCKS_MAPPED = 1024
"""Blocks in memory per process, over all indices; the system maps at least 64 KiB with each."""

FORMAT_VERSION = 4
MAGIC = b"PTINDEX\0"
TRAILER = struct.Struct("<QQQ8s")
DOCUMENT = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("flags", "<u4")])
FILE = np.dtype([("first_document", "<i8"), ("token_bytes", "<i8")])
VIRTUAL_SEP, HELD_OUT, VIRTUAL_BOS = 1, 2, 4  # flags of a document


def settings_digest(files: DatasetFiles, config: DataConfig) -> str:
    """Return a hexadecimal 64-bit hash of the settings that determine a dataset's documents."""
    values = {"block_documents": BLOCK_DOCUMENTS, "dataset": files.name, **config.values_that_decide("documents")}
    return _digest({**values, "format": load_format(files.file_type, config).identity})


def index_digest(files: DatasetFiles, config: DataConfig) -> str:
    """Return the digest of the settings and the index format."""
    return _digest({"format": FORMAT_VERSION, "settings": settings_digest(files, config)})


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class Index:
    """An index file, mapped into memory.

    Attributes:
        documents: [n] `DOCUMENT`.
        first_documents: [files + 1], number of each file's first document, then n.
        token_bytes: [files], bytes per token.
        is_signed: [files], whether the type of tokens is signed.
        content: record of the content of all files.
        checksum: CRC-32 of everything but the documents, which have their own in it.
    """

    def __init__(self, path: Path) -> None:
        """Map an index; raise a DataError if it is damaged, an OSError if it is unreadable."""
        self.path = path
        _open_indices.add(self)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < TRAILER.size:
                raise DataError("the index is damaged", path=path)
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header_end = size - TRAILER.size
        documents_end, header_bytes, self.checksum, magic = TRAILER.unpack_from(self._content, header_end)
        with memoryview(self._content) as content:
            if magic != MAGIC or zlib.crc32(content[documents_end:header_end]) != self.checksum:
                raise DataError("the index is damaged", path=path)
        self.header: dict[str, Any] = parse_json(self._content[header_end - header_bytes : header_end])
        self.content: str = self.header["content"]
        self.documents = self._part("documents", DOCUMENT)
        files = self._part("files", FILE)
        self.first_documents = np.ascontiguousarray(files["first_document"])
        self.token_bytes = np.abs(files["token_bytes"][:-1])
        self.is_signed = files["token_bytes"][:-1] < 0
        self._checksums = self._part("checksums", np.dtype("<u4"))
        numbers = range(len(self._checksums))
        groups = (numbers[first : first + _BLOCKS_AT_ONCE] for first in numbers[::_BLOCKS_AT_ONCE])
        if not all(map_in_order(self._are_intact, groups, usable_cores())):
            raise DataError("the index is damaged", path=path)
        self._release_pages()

    def _are_intact(self, blocks: range) -> bool:
        size = BLOCK_DOCUMENTS
        checksums = (zlib.crc32(self.documents[block * size : (block + 1) * size].data) for block in blocks)
        return all(checksum == self._checksums[block] for block, checksum in zip(blocks, checksums, strict=True))

    def _part(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        part = self.header["parts"][name]
        return np.ndarray(part["count"], dtype=dtype, buffer=self._content, offset=part["offset"])

    def documents_at(self, numbers: np.ndarray) -> np.ndarray:
        """Return copies of the `DOCUMENT`s with these numbers."""
        blocks = numbers // BLOCK_DOCUMENTS
        self.count_reads(1 + int(np.count_nonzero(blocks[1:] != blocks[:-1])))
        documents: np.ndarray = self.documents[numbers]
        return documents

    def count_reads(self, blocks: int) -> None:
        """Count blocks that were read, and release their memory after many.

        Pages of a mapped file count as memory of this process until they are released. They stay in the system's file
        cache, and are mapped again within microseconds.
        """
        self._blocks_read += blocks
        if self._blocks_read > _BLOCKS_MAPPED // len(_open_indices):
            self._release_pages()

    def _release_pages(self) -> None:
        self._blocks_read = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._content.madvise(mmap.MADV_DONTNEED)

    def files_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the file number of each document."""
        return np.searchsorted(self.first_documents, documents, side="right") - 1

    def locate(self, document: int) -> tuple[int, int]:
        """Return the file number of a document, and its row in the file."""
        file = int(self.files_of(np.asarray(document)))
        return file, document - int(self.first_documents[file])

    def split(self, name: str) -> Split:
        """Return the documents of one split."""
        return Split(self, name, self._part(f"bounds_{name}", np.dtype("<i8")))

    @property
    def records(self) -> np.ndarray:
        """Records of the content of each file, [files] uint64."""
        return self._part("records", np.dtype("<u8"))

    @property
    def file_sizes(self) -> dict[str, int]:
        """Sizes in bytes of the indexed files, by path."""
        part = self.header["parts"]["names"]
        sizes: dict[str, int] = json.loads(self._content[part["offset"] : part["offset"] + part["count"]])
        return sizes


_open_indices: weakref.WeakSet[Index] = weakref.WeakSet()


class Split:
    """The `Lengths` of one split's documents; documents of the other split are empty."""

    def __init__(self, index: Index, name: str, block_bounds: np.ndarray) -> None:
        self._index = index
        self._held_out = HELD_OUT if name == "held_out" else 0
        self.block_bounds = block_bounds
        self.block_documents = BLOCK_DOCUMENTS
        self.document_count = len(index.documents)

    @property
    def tokens(self) -> int:
        """Tokens of the split, virtual ones included."""
        return int(self.block_bounds[-1])

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens of documents [begin, end), virtual ones included, int64."""
        self._index.count_reads(1)
        return split_lengths(self._index.documents[begin:end], self._held_out)


def split_lengths(documents: np.ndarray, held_out: int) -> np.ndarray:
    """Return the tokens of documents, int64; 0 outside the split that `held_out` (0 or `HELD_OUT`) selects."""
    flags = documents["flags"]
    lengths = documents["tokens"].astype(np.int64)
    lengths += (flags & VIRTUAL_SEP) // VIRTUAL_SEP + (flags & VIRTUAL_BOS) // VIRTUAL_BOS
    lengths[(flags & HELD_OUT) != held_out] = 0
    return lengths
