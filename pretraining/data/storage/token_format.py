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
from pretraining.errors import ConfigError, DataError
from pretraining.files import check_regular

_SMALL_FILE_BYTES = 1 << 16
"""Size up to which reading a file is faster than mapping it."""


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
        title: name of such a file in messages: "an Arrow file".
        ending: last bytes of every undamaged file, checked when a file is opened; empty = not checked.
        identity: the format and its settings that determine the documents; a new identity makes a new index.
    """

    suffix: str
    title: str
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
    found: type[TokenFormat] = load_plugin("file_type", TOKEN_FORMATS.get(file_type, file_type))
    if not isinstance(getattr(found, "suffix", None), str) or not callable(getattr(found, "documents", None)):
        raise ConfigError(
            f"--file_type={file_type} is no token format: it lacks `suffix` or `documents` (docs/extending.md)"
        )
    return found


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
            return np.frombuffer(
                file.read() if is_small else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), dtype=np.uint8
            )
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path=path) from error


def as_tokens(content: np.ndarray, width: int, *, signed: bool = False) -> np.ndarray:
    """Return the bytes of a file as integers; drop an incomplete one at the end."""
    return content[: len(content) // width * width].view(f"<{'i' if signed else 'u'}{width}")
