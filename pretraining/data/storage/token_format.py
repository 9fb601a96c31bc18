"""The interface of a token file format, which also serves user-defined formats.

    --file_type --load_format--> a TokenFormat --documents(path), once per file--> DocumentLayout --> index

A format locates the documents of a file at indexing. Training then reads tokens by byte offset. docs/extending.md has
an example of a user-defined format.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pretraining.config.plugins import TOKEN_FORMATS, load_plugin, plugin_errors
from pretraining.config.training import DataConfig
from pretraining.data.storage.content import open_ranges
from pretraining.errors import ConfigError, DataError
from pretraining.files import LFS_POINTER, Location, check_regular, lfs_pointer_hint

_SMALL_FILE_BYTES = 1 << 16
"""Size up to which reading a file is faster than mapping it."""
SAMPLE_BYTES = 1 << 16
"""Bytes of a file whose tokens are looked at, to guess their type."""
_LARGEST_GAP = 64
"""Bytes between documents that are taken for separators."""
_FEWEST_WORDS = 64
_LARGEST_HIGH_WORD = 15
"""Upper 16 bits of the largest token in a vocabulary of 2**20."""


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a file, in order.

    Attributes:
        offsets: [n] int64, bytes from the start of the file to each document's first token; multiples of `width`
            except for empty documents.
        lengths: [n] int64, tokens.
        width: bytes per token: 1, 2, 4 or 8.
        tokens: the file as little-endian integers of this width. With a signed type, the file may have negative
            numbers, which are faults.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    width: int
    tokens: np.ndarray


class TokenFormat(Protocol):
    """A format that stores the tokens of a document as contiguous little-endian integers.

    Attributes:
        suffix: end of file names: ".arrow".
        ending: last bytes of every undamaged file, checked when training opens a file; empty = not checked.
        identity: the format and its settings that determine the documents; a new identity makes a new index.
    """

    suffix: str
    ending: bytes
    identity: str

    def __init__(self, config: DataConfig) -> None:
        """Read the format's settings; raise a ConfigError if one is missing."""

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; raise a DataError if it is damaged or of another format."""


def format_class(file_type: str) -> type[TokenFormat]:
    """Return the class of a format: one of `TOKEN_FORMATS`, or a user-defined `package.module:Class`.

    Raises:
        ConfigError: the class cannot be imported, or is no format.
    """
    row: type[TokenFormat] = load_plugin("file_type", TOKEN_FORMATS.get(file_type, file_type))
    if not isinstance(getattr(row, "suffix", None), str) or not callable(getattr(row, "documents", None)):
        raise ConfigError(
            f"--file_type={file_type} is no token format: it lacks `suffix` or `documents` (docs/extending.md)"
        )
    return row


def load_format(file_type: str, config: DataConfig) -> TokenFormat:
    """Make a format from the data settings.

    Raises:
        ConfigError: the class cannot be imported, is no format, fails, or lacks a setting.
    """
    make = format_class(file_type)
    with plugin_errors("file_type", file_type):
        return make(config)


def read_bytes(path: str) -> np.ndarray:
    """Return the bytes of a file, [size] uint8, mapped if large; raise a DataError if it is unreadable."""
    try:
        check_regular(path)
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            is_small = size <= _SMALL_FILE_BYTES
            content = file.read() if is_small else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path=path) from error
    if content[: len(LFS_POINTER)] == LFS_POINTER:
        raise DataError(lfs_pointer_hint(Path(path)), path=path)
    return np.frombuffer(content, dtype=np.uint8)


def beginning_of(path: Location, size: int) -> bytes:
    """Return the first bytes of a file; empty if it is no readable file."""
    try:
        with open_ranges(path) as read:
            return read(0, size)
    except OSError:
        return b""


def as_tokens(content: np.ndarray, width: int, *, signed: bool = False) -> np.ndarray:
    """Return the bytes of a file as integers; drop an incomplete one at the end."""
    return content[: len(content) // width * width].view(f"<{'i' if signed else 'u'}{width}")


def likely_dtype(content: np.ndarray) -> str | None:
    """Return the type that tokens in these bytes seem to have: "uint16", "uint32" or "uint64"; None = too few to say.

    Tokens of more than 16 bits have small numbers in their upper words: zeros, unless the vocabulary has more than
    65,536 tokens. Words of 16-bit tokens are alike in all places.

    Args:
        content: bytes from the beginning of a token on, uint8.
    """
    words = content[: len(content) // 8 * 8].view("<u2").reshape(-1, 4)
    if words.size < _FEWEST_WORDS or not words.any():
        return None
    first, second, third, fourth = words.max(axis=0).tolist()
    if not (third or fourth) and _is_upper(second, first):
        return "uint64"
    return "uint32" if _is_upper(max(second, fourth), min(first, third)) else "uint16"


def _is_upper(upper: int, lower: int) -> bool:
    """Return whether the largest words in two places are the upper and the lower halves of tokens."""
    return upper <= _LARGEST_HIGH_WORD and lower > 4 * upper


def contiguous_bytes(offsets: np.ndarray, lengths: np.ndarray, width: int) -> tuple[int, int]:
    """Return the range of bytes from the first token of some documents on that has only tokens; at most a sample.

    It begins at a multiple of 8, where a token of any width may begin.

    Args:
        offsets, lengths: [n] int64, bytes and tokens; a few separators may be between documents.
    """
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return 0, 0
    begins = offsets[filled]
    ends = begins + lengths[filled] * width
    gaps = begins[1:] - ends[:-1]
    last = int(np.flatnonzero(np.append((gaps < 0) | (gaps > _LARGEST_GAP), True))[0])
    begin = -(-int(begins[0]) // 8) * 8
    end = min(int(ends[last]), begin + SAMPLE_BYTES)
    return begin, max(begin, end)


def width_problem(tokens: np.ndarray) -> str | None:
    """Return how tokens are not of the type that their bytes seem to have; None if they are, or if one is negative."""
    width = tokens.itemsize
    if width == 1 or not len(tokens) or tokens.min() < 0:
        return None
    likely = likely_dtype(tokens.view(np.uint8))
    if likely is None or np.dtype(likely).itemsize == width:
        return None
    return (
        f"is read as tokens of {width} bytes, but its bytes look like {likely}: give --token_dtype={likely}. If the "
        "file itself names its type, write it again with the right one"
    )
