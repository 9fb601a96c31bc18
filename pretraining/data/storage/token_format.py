"""The seam for a format of token files: what training must know of one, and which there are.

    --file_type --load_format--> a TokenFormat --documents(path), once a file--> DocumentLayout --> index

A format says where the documents of a file lie, when the file is indexed. Training then reads tokens by byte offset.
docs/extending.md shows how to write one of your own.
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
"""Files up to this size are read as a whole, which is faster than to map them."""


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a file, in order.

    Attributes:
        offsets: [n] int64, bytes from the start of the file to a document's first token.
        lengths: [n] int64, in tokens.
        width: bytes a token: 1, 2, 4 or 8.
        tokens: the file as little-endian integers of this width, a multiple of which is the offset of every document
            that is not empty. A signed type means that the file may hold negative numbers; these are faults.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    width: int
    tokens: np.ndarray


class TokenFormat(Protocol):
    """A format in which the tokens of a document lie one behind another, as little-endian integers.

    Attributes:
        suffix: how names of its files end: ".arrow".
        title: what a message calls such a file: "an Arrow file".
        ending: bytes that every sound file ends with; empty where there are none. Looked at when a file is opened.
        identity: the format and those of its own settings that decide which documents it finds; other ones make another
            index.
    """

    suffix: str
    title: str
    ending: bytes
    identity: str

    def __init__(self, config: DataConfig) -> None:
        """Take what the format needs of the settings; a ConfigError where one is missing."""

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; a DataError names one that is damaged, or not of this format."""


def format_class(file_type: str) -> type[TokenFormat]:
    """Return the class of a format: one of `TOKEN_FORMATS`, or a user's own as `package.module:Class`.

    Raises:
        ConfigError: it cannot be imported, or is something else.
    """
    found: type[TokenFormat] = load_plugin("file_type", TOKEN_FORMATS.get(file_type, file_type))
    if not isinstance(getattr(found, "suffix", None), str) or not callable(getattr(found, "documents", None)):
        raise ConfigError(
            f"--file_type={file_type} is no format of token files: it lacks suffix or documents (docs/extending.md)"
        )
    return found


def load_format(file_type: str, config: DataConfig) -> TokenFormat:
    """Make a format for a run's settings.

    Raises:
        ConfigError: it cannot be imported, is something else, fails, or misses a setting.
    """
    make = format_class(file_type)
    with plugin_errors("file_type", file_type):
        return make(config)


def read_bytes(path: str) -> np.ndarray:
    """Return the bytes of a file, [size] uint8, a large one mapped; a DataError where it cannot be read."""
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
    """Return the bytes of a file as integers, without those that are left over at its end."""
    return content[: len(content) // width * width].view(f"<{'i' if signed else 'u'}{width}")
