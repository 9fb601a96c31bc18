"""The index of a dataset: where every document lies and how long it is, in one file that processes map into memory.

    documents   n of (byte offset of the first token, tokens, flags)        n * 16 bytes
    files       number of each file's first document, and bytes a token,    (files + 1) * 16 bytes
                negative where tokens are of a signed type
    bounds      tokens before each block of `BLOCK_DOCUMENTS` documents, once for each split
    checksums   CRC-32 of each block of documents                           blocks * 4 bytes
    names       JSON: path -> bytes of every file, read only to say what changed
    header      JSON: what the index was made for, and where the parts above begin
    trailer     length of the documents and of the header, CRC-32 of all between documents and trailer, magic number

Documents have canonical numbers: files by sorted path, rows in order. A document belongs to the held-out split by a
hash of (dataset, path, row), so adding files or rows moves no other document; documents of the other split count as
empty. What is put around documents are virtual tokens: they count in lengths and are made when tokens are read, never
stored. A document of which no stored token is left has length 0, and no virtual tokens.

An index is valid for exactly one listing and one `settings_digest`. It is checked when it is opened, all of it, and
`index_build.py` makes it again if it is damaged.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.token_format import load_format
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import check_regular, parse_json, reason_of
from pretraining.launch.machine import usable_cores

Made = TypeVar("Made")

BLOCK_DOCUMENTS = 1024
"""Documents a block, a power of two: a cursor holds the lengths of one block; documents are shuffled inside blocks."""
SPLITS = ("train", "held_out")

_BLOCKS_AT_ONCE = 1024
"""Blocks that a thread checks before it gives its result."""
_BLOCKS_MAPPED = 1024
"""Blocks that a process keeps mapped, over all indices; the system maps 64 KiB or more with each."""

FORMAT_VERSION = 3
MAGIC = b"PTINDEX\0"
TRAILER = struct.Struct("<QQQ8s")
DOCUMENT = np.dtype([("offset", "<u8"), ("tokens", "<u4"), ("flags", "<u4")])
FILE = np.dtype([("first_document", "<i8"), ("token_bytes", "<i8")])
VIRTUAL_SEP, HELD_OUT, VIRTUAL_BOS = 1, 2, 4  # flags of a document


def settings_digest(files: DatasetFiles, config: DataConfig) -> str:
    """Return 64 bits of hexadecimal over what decides, besides the files, which documents a dataset has."""
    values = {
        "block_documents": BLOCK_DOCUMENTS,
        "dataset": files.name,
        "column": config.col_name,
        "sep_token": config.sep_token,
        "held_out_fraction": float(config.held_out_fraction),
        "bos_token": config.bos_token,
        "strip_tokens": sorted(set(config.strip_tokens)),
        "min_length": config.min_length,
    }
    identity = load_format(files.file_type, config).identity
    return _digest({**values, "format": identity} if identity else values)


def index_digest(files: DatasetFiles, config: DataConfig) -> str:
    """Return the digest of the settings and of the present format of index files."""
    return _digest({"format": FORMAT_VERSION, "settings": settings_digest(files, config)})


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class Index:
    """An index file, mapped into memory.

    Attributes:
        documents: [n] `DOCUMENT`.
        first_documents: [files + 1], number of each file's first document, then n.
        token_bytes: [files], bytes a token.
        is_signed: [files], whether tokens are of a signed type.
    """

    def __init__(self, path: Path) -> None:
        """Map an index; a DataError if it is damaged, an OSError if it cannot be read."""
        self.path = path
        _open_indices.add(self)
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < TRAILER.size:
                raise DataError("the index is damaged", path=path)
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header_end = size - TRAILER.size
        documents_end, header_bytes, checksum, magic = TRAILER.unpack_from(self._content, header_end)
        with memoryview(self._content) as content:
            if magic != MAGIC or zlib.crc32(content[documents_end:header_end]) != checksum:
                raise DataError("the index is damaged", path=path)
        self.header: dict[str, Any] = parse_json(self._content[header_end - header_bytes : header_end])
        self.documents = self._part("documents", DOCUMENT)
        files = self._part("files", FILE)
        self.first_documents = np.ascontiguousarray(files["first_document"])
        self.token_bytes = np.abs(files["token_bytes"][:-1])
        self.is_signed = files["token_bytes"][:-1] < 0
        self._checksums = self._part("checksums", np.dtype("<u4"))
        numbers = range(len(self._checksums))
        groups = (numbers[first : first + _BLOCKS_AT_ONCE] for first in numbers[::_BLOCKS_AT_ONCE])
        if not all(map_in_order(self._are_whole, groups, usable_cores())):
            raise DataError("the index is damaged", path=path)
        self._let_go()

    def _are_whole(self, blocks: range) -> bool:
        size = BLOCK_DOCUMENTS
        checksums = (zlib.crc32(self.documents[block * size : (block + 1) * size].data) for block in blocks)
        return all(checksum == self._checksums[block] for block, checksum in zip(blocks, checksums, strict=True))

    def _part(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        part = self.header["parts"][name]
        return np.ndarray(part["count"], dtype=dtype, buffer=self._content, offset=part["offset"])

    def documents_at(self, numbers: np.ndarray) -> np.ndarray:
        """Copy the `DOCUMENT`s with these canonical numbers."""
        blocks = numbers // BLOCK_DOCUMENTS
        self.note_looks(1 + int(np.count_nonzero(blocks[1:] != blocks[:-1])))
        documents: np.ndarray = self.documents[numbers]
        return documents

    def note_looks(self, blocks: int) -> None:
        """Count blocks that were looked at, and lets go of them once they are many.

        What is looked at in a mapped file counts as memory of this process until it is let go; it stays in the system's
        file cache, and is mapped again within microseconds.
        """
        self._looks += blocks
        if self._looks > _BLOCKS_MAPPED // len(_open_indices):
            self._let_go()

    def _let_go(self) -> None:
        self._looks = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            self._content.madvise(mmap.MADV_DONTNEED)

    def files_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of the file that holds each document."""
        return np.searchsorted(self.first_documents, documents, side="right") - 1

    def place(self, document: int) -> tuple[int, int]:
        """Return the number of the file that holds a document, and the document's row in it."""
        file = int(self.files_of(np.asarray(document)))
        return file, document - int(self.first_documents[file])

    def split(self, name: str) -> Split:
        """Return the documents of one split."""
        return Split(self, name, self._part(f"bounds_{name}", np.dtype("<i8")))

    @property
    def file_sizes(self) -> dict[str, int]:
        """Path -> bytes of the files that the index was made from."""
        part = self.header["parts"]["names"]
        sizes: dict[str, int] = json.loads(self._content[part["offset"] : part["offset"] + part["count"]])
        return sizes


_open_indices: weakref.WeakSet[Index] = weakref.WeakSet()


class Split:
    """The lengths of one split's documents; those of the other split count as empty. See `Lengths`."""

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
        """Tokens of documents [begin, end), virtual ones included, int64."""
        self._index.note_looks(1)
        return split_lengths(self._index.documents[begin:end], self._held_out)


def split_lengths(documents: np.ndarray, held_out: int) -> np.ndarray:
    """Return tokens of documents in the split of `held_out` (0 or `HELD_OUT`), int64: 0 for the other split's."""
    flags = documents["flags"]
    lengths = documents["tokens"].astype(np.int64)
    lengths += (flags & VIRTUAL_SEP) // VIRTUAL_SEP + (flags & VIRTUAL_BOS) // VIRTUAL_BOS
    lengths[(flags & HELD_OUT) != held_out] = 0
    return lengths


def index_places(files: DatasetFiles, config: DataConfig) -> list[Path]:
    """Return where an index may be, in order: in `index_path` or, without one, beside the data or in a cache."""
    # A file of its own for each list of files: one that is mapped by a running job is never replaced under it.
    name = f"{index_digest(files, config)}-{files.digest[:16]}.index"
    if config.index_path is not None:
        return [Path(config.index_path).expanduser().absolute() / files.name / name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder_key = hashlib.blake2b(os.path.realpath(files.folder).encode("utf-8", "surrogateescape"), digest_size=8)
    return [Path(files.folder) / ".index" / name, cache / "pretraining" / "indices" / folder_key.hexdigest() / name]


def find_index(files: DatasetFiles, config: DataConfig) -> Index | None:
    """Open the index of a dataset if there is a valid one."""
    found = map(open_any_index, index_places(files, config))  # whose names say what they are for
    return next((index for index in found if index is not None), None)


def open_any_index(place: Path) -> Index | None:
    """Open the index at a place; None where there is none or it is damaged (it is made again then)."""
    try:
        return Index(place)
    except (OSError, DataError, ValueError, KeyError, TypeError):
        return None


def write_once(
    places: Sequence[Path], what: str, write: Callable[[IO[bytes]], None], find: Callable[[], Made | None]
) -> Made:
    """Write a file at the first of several places that can be written to, complete or not at all, and opens it.

    Args:
        what: the file, for messages: "the index of dataset 'web'".
        find: opens a valid one at any of the places; None where there is none.

    Raises:
        DataError: there is no such place, or the disk is full.
    """
    refused = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=".tmp")
            break
        except OSError as error:
            refused.append(f"{place.parent} ({error.strerror})")
    else:
        raise DataError(f"no place to write {what}: {'; '.join(refused)}: give --index_path")
    try:
        with os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        # Another job may have made it meanwhile, and have it mapped: replaced on another machine, it would be gone.
        made = find()
        if made is None:
            Path(temporary).chmod(0o644)  # temporary files are private, an index is for all who can read the data
            Path(temporary).replace(place)
            made = find()
    except OSError as error:
        raise DataError(f"{what} cannot be written: {reason_of(error)}", path=place) from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    if made is None:
        raise DataError(f"{what} was written here and cannot be read", path=place)
    return made
