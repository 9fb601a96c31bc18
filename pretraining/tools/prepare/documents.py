"""Text files and JSON lines as documents, unpacked on the way."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import InputFile

PIECE_CHARACTERS = 1 << 19
"""Longest text encoded at once; a longer document is cut."""
_BLOCK_BYTES = 1 << 18

# Where a cut changes no token: byte-level BPE splits text into words first, and none of the usual rules (GPT-2, cl100k,
# Llama 3) has a word that goes on from a letter or digit into white space, or that looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = (1 << 8, 1 << 16)


class Document(NamedTuple):
    """A document, or a part of a long text file.

    Attributes:
        content: its text, or its token ids, [T] of any integer type.
        bytes_read: bytes of the input on disk that were read for it.
        path, row: where it is, for messages: lines count from 1, rows of tables from 0.
        is_last_part: whether the next one is another document.
    """

    content: str | np.ndarray
    bytes_read: int
    path: str
    row: int | None = None
    is_last_part: bool = True

    def error(self, text: str) -> DataError:
        """Make the error for users that names this document."""
        return DataError(text, path=self.path, row=self.row)


def read_text(file: InputFile) -> Iterator[Document]:
    """Read a file as one document, in parts; a DataError says where it cannot be read or is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, unpacked, path = "", 0, str(file.path)
    with _open(file) as (stream, bytes_read):
        for block in chain(iter(partial(stream.read, PIECE_CHARACTERS), b""), [b""]):
            try:
                text += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # The decoder's object is what was left of the last block, and this one.
                raise _not_utf8(error, unpacked + len(block) - len(error.object), file, path) from error
            text = text if unpacked else text.removeprefix("\ufeff")
            unpacked += len(block)
            while len(text) > PIECE_CHARACTERS:
                end = end_of_piece(text, 0, PIECE_CHARACTERS)
                yield Document(text[:end], bytes_read(), path, is_last_part=False)
                text = text[end:]
        yield Document(text, bytes_read(), path)


def read_lines(file: InputFile, text_field: str, begin: int = 0, end: int | None = None) -> Iterator[Document]:
    """Read a file with a document per line; blank lines are skipped.

    Args:
        begin: the lines that begin at this byte or later are read; 0 if the file is compressed.
        end: and before this one; None = to the end.

    Raises:
        DataError: the file cannot be read or unpacked, or is not UTF-8 or JSON lines with that field; says where.
    """
    offset, path = 0, str(file.path)
    with _open(file, begin) as (stream, bytes_read):
        if begin:  # a line that begins before it is another part's
            offset = begin - 1 + len(stream.readline())
            path = f"{path} from byte {offset:,}"
        for number, line in enumerate(stream, start=1):
            if end is not None and offset >= end:
                return
            try:
                decoded = line.decode("utf-8").removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise _not_utf8(error, offset, file, path, number) from error
            offset += len(line)
            if decoded.strip():
                try:
                    text = _text_of(decoded, text_field)
                except ValueError as error:
                    raise DataError(str(error), path=path, row=number) from error
                yield Document(text, bytes_read(), path, number)


def end_of_piece(text: str, begin: int, longest: int) -> int:
    """Return where to end a piece of a text that is longer: where no word goes across, if there is such a place."""
    end = begin + longest
    for searched in _CUT_SEARCH_CHARACTERS:
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, max(begin + 1, end - searched), end)]
        if cuts:
            return cuts[-1]
    return end


@contextmanager
def _open(file: InputFile, begin: int = 0) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Give the unpacked bytes from `begin` on, and a function that counts bytes on disk since it was last called."""
    try:
        with file.path.open("rb") as raw:
            if begin:
                raw.seek(begin - 1)
            counted = begin

            def bytes_read() -> int:
                nonlocal counted
                before, counted = counted, max(counted, min(raw.tell(), file.size))
                return counted - before

            stream: BinaryIO = raw
            if file.compression == "gz":
                stream = io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK_BYTES)
            elif file.compression == "zst":
                packed = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
                stream = io.BufferedReader(packed, _BLOCK_BYTES)
            yield stream, bytes_read
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        hint = f". If it was cut off or is no {file.compression} file, fetch it again" if file.compression else ""
        raise DataError(f"it cannot be read: {reason}{hint}", path=file.path) from error


def _not_utf8(error: UnicodeDecodeError, offset: int, file: InputFile, path: str, row: int | None = None) -> DataError:
    """Make the error for bytes that begin at an offset of the unpacked file."""
    unpacked = " of the unpacked text" if file.compression else ""
    place = f"at byte {offset + error.start:,}{unpacked} (0x{error.object[error.start]:02x}, {error.reason})"
    return DataError(f"not UTF-8 {place}. Convert it, as iconv does, or leave it out", path=path, row=row)


def _text_of(line: str, text_field: str) -> str:
    """Return the text in one line of JSON, empty for null; a ValueError says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("no object: a line must be one with a field of text")
    text = row.get(text_field, 0)
    if text is None:
        return ""
    if not isinstance(text, str):
        fields = ", ".join(map(repr, row))[:400]
        raise ValueError(f"no text in a field {text_field!r}. The fields are: {fields}; name one by --text_field")
    if not text.isascii():
        text.encode("utf-8")  # JSON can spell half of a surrogate pair, which is no text: a UnicodeEncodeError
    return text
