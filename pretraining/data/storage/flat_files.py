"""Files that hold nothing but tokens: `.npy` arrays, and `.bin` files as llm.c and nanoGPT write them.

Documents end at `sep_token`; one scan finds the ends when a file is indexed. A separator is a mark between documents
and none of their tokens, so these are the documents that an Arrow file would hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.token_format import DocumentLayout, as_tokens, read_bytes
from pretraining.errors import ConfigError, DataError

BIN_MAGIC = 20240520
"""First number of llm.c's header, which is 256 numbers of 32 bits: magic, version, tokens."""
BIN_WIDTHS = {1: 2, 7: 4}
"""Bytes a token by the header's version: 1 is for GPT-2's vocabulary, 7 for Llama 3's."""
_BIN_HEADER_BYTES = 1024

_TOKENS_AT_ONCE = 1 << 22


class NpyFormat:
    """One-dimensional arrays of integers, as `numpy.save` writes them."""

    suffix, title, ending, identity = ".npy", "a NumPy file", b"", "npy"

    def __init__(self, config: DataConfig) -> None:
        self._separator = _separator(config, self.suffix)

    def documents(self, path: str) -> DocumentLayout:
        """Find the documents of a file; see `TokenFormat`."""
        read_bytes(path)  # a DataError of its own where there is no file
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as error:  # the header is a Python literal: whatever its parser may meet
            raise DataError(f"truncated or damaged: {error}", path=path) from error
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
            raise DataError(
                f"an array of shape {array.shape} and type {array.dtype}, but token files hold one dimension of "
                "little-endian integers, such as uint16",
                path=path,
            )
        return _documents(path, array.offset, array.size, array.dtype, self._separator)


class BinFormat:
    """Tokens with the header of llm.c, or without any, as nanoGPT writes them: `token_dtype` says their type then."""

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
            raise DataError(f"its header says the type of its tokens: leave out --token_dtype={self._dtype}", path=path)
        width = BIN_WIDTHS.get(version)
        if width is None:
            raise DataError(
                f"header of version {version}, but {', '.join(map(str, BIN_WIDTHS))} can be read", path=path
            )
        if len(content) != _BIN_HEADER_BYTES + width * count:
            raise DataError(
                f"truncated or damaged: its header says that it holds {count:,} tokens of {width} bytes, but "
                f"{len(content) - _BIN_HEADER_BYTES:,} bytes follow it",
                path=path,
            )
        return _documents(path, _BIN_HEADER_BYTES, count, np.dtype(f"<u{width}"), self._separator)

    def _without_header(self, path: str, size: int) -> DocumentLayout:
        if self._dtype is None:
            raise DataError(
                f"it does not begin with the header of llm.c ({BIN_MAGIC}), so it does not say the type of its "
                "tokens: give --token_dtype=uint16 or uint32",
                path=path,
            )
        dtype = np.dtype(self._dtype)
        if size % dtype.itemsize:
            raise DataError(f"truncated or of another type: {size:,} bytes are no {self._dtype} tokens", path=path)
        return _documents(path, 0, size // dtype.itemsize, dtype, self._separator)


def find_documents(tokens: np.ndarray, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Find where documents that end at a separator begin, and their tokens without it, both [n] int64.

    What follows the last separator is a document too, where there is anything.
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
    """Find the documents among `count` tokens from a byte of a file on."""
    content, width = read_bytes(path), dtype.itemsize
    if offset % width or len(content) != offset + count * width:
        raise DataError(f"truncated or damaged: {count:,} tokens of {width} bytes do not end where it does", path=path)
    whole = as_tokens(content, width, signed=dtype.kind == "i")
    tokens = whole[offset // width :]
    begins, lengths = find_documents(tokens, separator)
    if len(tokens) and lengths[0] == len(tokens):
        raise DataError(
            f"no sep_token={separator} in its {len(tokens):,} tokens, so no document ends: see --sep_token", path=path
        )
    return DocumentLayout(offset + begins * width, lengths, width, whole)


def _separator(config: DataConfig, suffix: str) -> int:
    if config.sep_token is None:
        raise ConfigError(f"documents of *{suffix} files end at a token: give its id as --sep_token")
    return config.sep_token
