"""Formats of files with tokens only: `.npy` arrays, and `.bin` files of llm.c and nanoGPT.

Documents end at `sep_token`; one scan at indexing finds the ends. Separators do not belong to the stored documents, so
these equal the documents of an Arrow file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, read_bytes
from pretraining.errors import ConfigError, DataError

BIN_MAGIC = 20240520
"""First number of llm.c's header of 256 32-bit numbers: magic, version, tokens."""
BIN_WIDTHS = {1: 2, 7: 4}
"""Bytes per token by the header's version: 1 for GPT-2's vocabulary, 7 for Llama 3's."""
_BIN_HEADER_BYTES = 1024

_TOKENS_AT_ONCE = 1 << 22


class NpyFormat:
    """One-dimensional arrays of integers, as `numpy.save` writes them."""

    suffix, title, ending, identity = ".npy", "a NumPy file", b"", "npy"

    def __init__(self, config: DataConfig) -> None:
        self._separator = _separator(config, self.suffix)

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        read_bytes(path)  # raises a DataError if the file is missing
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # the header is a Python literal, whose parser raises many types
            raise DataError(f"truncated or damaged: {error}", path=path) from error
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
            raise DataError(
                f"an array of shape {array.shape} and type {array.dtype}: store one dimension of little-endian "
                "integers, such as uint16",
                path=path,
            )
        return _documents(path, array.offset, array.size, array.dtype, self._separator)


class BinFormat:
    """Tokens with the header of llm.c, or without a header as nanoGPT writes them; these need `token_dtype`."""

    suffix, title, ending = ".bin", "a token file", b""

    def __init__(self, config: DataConfig) -> None:
        self._separator = _separator(config, self.suffix)
        self._dtype = config.token_dtype
        self.identity = f"bin {self._dtype}" if self._dtype else "bin"

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        content = read_bytes(path)
        if content[:4].tobytes() != BIN_MAGIC.to_bytes(4, "little"):
            return self._without_header(path, len(content))
        if len(content) < _BIN_HEADER_BYTES:
            raise DataError(f"truncated or damaged: it ends at byte {len(content):,}, inside its header", path=path)
        version, count = content[4:12].view("<i4").tolist()
        if self._dtype is not None:
            raise DataError(f"its header has the type of tokens: leave out --token_dtype={self._dtype}", path=path)
        width = BIN_WIDTHS.get(version)
        if width is None:
            raise DataError(
                f"header of version {version}, but only {', '.join(map(str, BIN_WIDTHS))} are supported", path=path
            )
        if len(content) != _BIN_HEADER_BYTES + width * count:
            raise DataError(
                f"truncated or damaged: its header promises {count:,} tokens of {width} bytes, but "
                f"{len(content) - _BIN_HEADER_BYTES:,} bytes follow",
                path=path,
            )
        return _documents(path, _BIN_HEADER_BYTES, count, np.dtype(f"<u{width}"), self._separator)

    def _without_header(self, path: str, size: int) -> DocumentLayout:
        if self._dtype is None:
            raise DataError(
                f"no llm.c header ({BIN_MAGIC}), so the type of tokens is unknown: give --token_dtype=uint16 or uint32",
                path=path,
            )
        dtype = np.dtype(self._dtype)
        if size % dtype.itemsize:
            raise DataError(f"truncated or not {self._dtype}: {size:,} bytes are no whole number of tokens", path=path)
        return _documents(path, 0, size // dtype.itemsize, dtype, self._separator)


def find_documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of documents, and their lengths without the separators that end them, both [n] int64.

    Tokens after the last separator are a document too.
    """
    found = [
        begin + np.flatnonzero(tokens[begin : begin + _TOKENS_AT_ONCE] == separator)
        for begin in range(0, len(tokens), _TOKENS_AT_ONCE)
    ]
    separators = np.concatenate([np.zeros(0, dtype=np.int64), *found])
    begins, ends = np.concatenate(([0], separators + 1)), np.append(separators, len(tokens))
    if begins[-1] == len(tokens):
        begins, ends = begins[:-1], ends[:-1]
    return begins, ends - begins


def _documents(path: str, offset: int, count: int, dtype: np.dtype[Any], separator: int) -> DocumentLayout:
    """Find the documents among the `count` tokens at a byte offset of a file."""
    content, width = read_bytes(path), dtype.itemsize
    if offset % width or len(content) != offset + count * width:
        raise DataError(f"truncated or damaged: its size does not fit {count:,} tokens of {width} bytes", path=path)
    whole = as_tokens(content, width, signed=dtype.kind == "i")
    tokens = whole[offset // width :]
    begins, lengths = find_documents(tokens, separator)
    if len(tokens) and lengths[0] == len(tokens):
        raise DataError(f"its {len(tokens):,} tokens contain no sep_token={separator}: see --sep_token", path=path)
    return DocumentLayout(offset + begins * width, lengths, width, whole)


def _separator(config: DataConfig, suffix: str) -> int:
    if config.sep_token is None:
        raise ConfigError(f"--sep_token is needed: it ends the documents of *{suffix} files")
    return config.sep_token
