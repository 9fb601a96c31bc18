"""Formats of files with tokens only: `.npy` arrays, `.bin` files of llm.c, and both without a header.

Documents end at `sep_token`; one scan at indexing finds the ends. Separators do not belong to the stored documents, so
these equal the documents of an Arrow file.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import (
    SAMPLE_BYTES,
    DocumentLayout,
    as_tokens,
    beginning_of,
    likely_dtype,
    read_bytes,
    width_problem,
)
from pretraining.errors import ConfigError, DataError
from pretraining.files import Location

BIN_MAGIC = 20240520
"""First number of llm.c's header of 256 32-bit numbers: magic, version, tokens."""
BIN_WIDTHS = {1: 2, 7: 4}
"""Bytes per token by the header's version: 1 for GPT-2's vocabulary, 7 for Llama 3's."""
_BIN_HEADER_BYTES = 1024

NPY_MAGIC = b"\x93NUMPY"

_WITHOUT = "To read a file without one as one document, append an id that it does not hold (docs/coming-from.md)"
_TOKENS_AT_ONCE = 1 << 22
_header_lock = Lock()
"""Python's `ast`, which reads the header, fails at random in several threads at once."""


class _FlatFormat:
    """A format of files with tokens only, whose subclasses find the tokens in a file."""

    suffix: str
    ending = b""

    def __init__(self, config: DataConfig) -> None:
        if config.sep is None:
            raise ConfigError(f"--sep_token is needed: it ends the documents of *{self.suffix} files. {_WITHOUT}")
        self._separator, self._dtype = config.sep, config.token_dtype

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        content = read_bytes(path)
        try:
            offset, dtype = self._find_tokens(path, content)
            return _documents(content, offset, dtype, self._separator)
        except DataError as error:
            raise DataError(str(error), path=path) from error

    def _find_tokens(self, path: str, content: np.ndarray) -> tuple[int, np.dtype[Any]]:
        """Return the first byte of the tokens, and their type; they fill the rest of the file."""
        raise NotImplementedError


class NpyFormat(_FlatFormat):
    """One-dimensional arrays of integers, as `numpy.save` writes them."""

    suffix, identity = ".npy", "npy"

    def _find_tokens(self, path: str, content: np.ndarray) -> tuple[int, np.dtype[Any]]:
        if content[: len(NPY_MAGIC)].tobytes() != NPY_MAGIC:
            if not len(content):
                raise DataError("truncated or damaged: it is empty")
            raise DataError(
                "no NumPy header: damaged, or an array without a header, as Dolma and OLMo write. " + _advice(content)
            )
        try:
            with _header_lock:
                array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # the header is a Python literal, whose parser raises many types
            raise DataError(f"truncated or damaged: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
            raise DataError(
                f"an array of shape {array.shape} and type {array.dtype}: store one dimension of little-endian "
                "integers, such as uint16"
            )
        _check_size(content, array.offset, array.size, array.dtype)
        return array.offset, array.dtype


class RawNpyFormat(_FlatFormat):
    """Arrays without a header, as `numpy.memmap` writes them; the files of Dolma and OLMo. They need `token_dtype`."""

    suffix = ".npy"

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        if config.token_dtype is None:
            raise ConfigError("--token_dtype is needed: it is the type of tokens in .npy files without a header")
        self.identity = f"npy_raw {self._dtype}"

    @staticmethod
    def accepts(path: Location, config: DataConfig) -> bool:
        """Return whether a file has no header, and the settings give its type."""
        return config.token_dtype is not None and beginning_of(path, len(NPY_MAGIC)) not in (b"", NPY_MAGIC)

    def _find_tokens(self, path: str, content: np.ndarray) -> tuple[int, np.dtype[Any]]:
        if content[: len(NPY_MAGIC)].tobytes() == NPY_MAGIC:
            raise DataError("has a NumPy header, unlike other files of its dataset: make two datasets")
        return 0, np.dtype(self._dtype)


class BinFormat(_FlatFormat):
    """Tokens with the header of llm.c, or without a header as nanoGPT writes them; these need `token_dtype`."""

    suffix = ".bin"

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.identity = f"bin {self._dtype}" if self._dtype else "bin"

    def _find_tokens(self, path: str, content: np.ndarray) -> tuple[int, np.dtype[Any]]:
        if content[:4].tobytes() != BIN_MAGIC.to_bytes(4, "little"):
            if self._dtype is None:
                raise DataError(f"no llm.c header ({BIN_MAGIC}). {_advice(content)}")
            return 0, np.dtype(self._dtype)
        if len(content) < _BIN_HEADER_BYTES:
            raise DataError(f"truncated or damaged: it ends at byte {len(content):,}, inside its header")
        version, count = content[4:12].view("<i4").tolist()
        if self._dtype is not None:
            raise DataError(f"its header has the type of tokens: leave out --token_dtype={self._dtype}")
        if version not in BIN_WIDTHS:
            supported = ", ".join(map(str, BIN_WIDTHS))
            raise DataError(f"header of version {version}, but only {supported} are supported")
        dtype = np.dtype(f"<u{BIN_WIDTHS[version]}")
        _check_size(content, _BIN_HEADER_BYTES, count, dtype)
        return _BIN_HEADER_BYTES, dtype


def _check_size(content: np.ndarray, offset: int, count: int, dtype: np.dtype[Any]) -> None:
    """Raise a DataError unless a file has as many tokens as its header says."""
    if len(content) != offset + count * dtype.itemsize or offset % dtype.itemsize:
        raise DataError(
            f"truncated or damaged: its header promises {count:,} tokens of {dtype.itemsize} bytes, but "
            f"{len(content) - offset:,} bytes follow"
        )


def find_documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of documents, and their lengths without the separators that end them, both [n] int64.

    Tokens after the last separator are a document too.
    """
    places = [np.zeros(0, dtype=np.int64)]
    for begin in range(0, len(tokens), _TOKENS_AT_ONCE):
        piece = tokens[begin : begin + _TOKENS_AT_ONCE]
        places.append(begin + np.flatnonzero(piece == separator))
    separators = np.concatenate(places)
    begins, ends = np.concatenate(([0], separators + 1)), np.append(separators, len(tokens))
    if begins[-1] == len(tokens):
        begins, ends = begins[:-1], ends[:-1]
    return begins, ends - begins


def _advice(content: np.ndarray) -> str:
    """Return the setting that reads a file without a header."""
    likely = likely_dtype(content[:SAMPLE_BYTES])
    value = f"={likely}, as its bytes look" if likely else "=uint16 or uint32"
    return f"Without a header the type of tokens is unknown: give --token_dtype{value}"


def _documents(content: np.ndarray, offset: int, dtype: np.dtype[Any], separator: int) -> DocumentLayout:
    """Find the documents among the tokens from a byte of a file on."""
    width = dtype.itemsize
    if len(content) % width:
        likely = likely_dtype(content[:SAMPLE_BYTES])
        hint = f". Give --token_dtype={likely}, as its bytes look" if likely not in (None, dtype.name) else ""
        raise DataError(f"truncated or not {dtype.name}: {len(content):,} bytes are no whole number of tokens{hint}")
    whole = as_tokens(content, width, signed=dtype.kind == "i")
    tokens = whole[offset // width :]
    begins, lengths = find_documents(tokens, separator)
    if len(tokens) and lengths[0] == len(tokens):
        problem = width_problem(tokens[: SAMPLE_BYTES // width])
        hint = f". It {problem}" if problem else ""
        problem = f"its {len(tokens):,} tokens contain no sep_token={separator}: see --sep_token"
        raise DataError(f"{problem}{hint}. {_WITHOUT}")
    return DocumentLayout(offset + begins * width, lengths, width, whole)
