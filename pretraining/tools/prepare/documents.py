"""Readers of documents in text files and JSON lines, which may be compressed."""

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
"""Longest text encoded in one call; longer documents are cut."""
_BLOCK_BYTES = 1 << 18

# A cut here changes no token. Byte-level BPE first splits text into words. In the usual rules (GPT-2, cl100k, Llama 3),
# no word continues from a letter or digit into white space, and no rule looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = (1 << 8, 1 << 16)


class Document(NamedTuple):
    """A document, or a part of a long text file.

    Attributes:
        content: text, or token ids [T] of any integer type.
        bytes_read: bytes read from disk for this document.
        path, row: place for messages; lines count from 1, rows of tables from 0.
        is_last_part: whether the document ends here.
    """

    content: str | np.ndarray
    bytes_read: int
    path: str
    row: int | None = None
    is_last_part: bool = True

    def error(self, text: str) -> DataError:
        """Return an error that names this document."""
        return DataError(text, path=self.path, row=self.row)


def read_text(file: InputFile) -> Iterator[Document]:
    """Yield the parts of a file that is one document; raise a DataError if it cannot be read or is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, unpacked, path = "", 0, str(file.path)
    with _open(file) as (stream, bytes_read):
        for block in chain(iter(partial(stream.read, PIECE_CHARACTERS), b""), [b""]):
            try:
                text += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # `error.object` is the rest of the previous block plus this block.
                raise _not_utf8(error, unpacked + len(block) - len(error.object), file, path) from error
            text = text if unpacked else text.removeprefix("\ufeff")
            unpacked += len(block)
            while len(text) > PIECE_CHARACTERS:
                end = end_of_piece(text, 0, PIECE_CHARACTERS)
                yield Document(text[:end], bytes_read(), path, is_last_part=False)
                text = text[end:]
        yield Document(text, bytes_read(), path)


def read_lines(file: InputFile, text_field: str, begin: int = 0, end: int | None = None) -> Iterator[Document]:
    """Yield a document per line of a file; skip blank lines.

    Args:
        begin: first byte; a line is read if it begins in [begin, end). 0 for compressed files.
        end: byte after the last; None = end of the file.

    Raises:
        DataError: the file cannot be read or unpacked, or is not UTF-8 or JSON lines with that field.
    """
    offset, path = 0, str(file.path)
    with _open(file, begin) as (stream, bytes_read):
        if begin:  # a line that begins earlier belongs to another part
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
    """Return the end of a piece that starts at `begin`: between words if possible, at most `longest` characters."""
    end = begin + longest
    for searched in _CUT_SEARCH_CHARACTERS:
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, max(begin + 1, end - searched), end)]
        if cuts:
            return cuts[-1]
    return end


@contextmanager
def _open(file: InputFile, begin: int = 0) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Yield the unpacked bytes from `begin - 1` on, and a function that counts the bytes read since its last call."""
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
        hint = f". If it is truncated or no {file.compression} file, fetch it again" if file.compression else ""
        raise DataError(f"it cannot be read: {reason}{hint}", path=file.path) from error


def _not_utf8(error: UnicodeDecodeError, offset: int, file: InputFile, path: str, row: int | None = None) -> DataError:
    """Return the error for bytes that begin at an offset of the unpacked file."""
    unpacked = " of the unpacked text" if file.compression else ""
    place = f"at byte {offset + error.start:,}{unpacked} (0x{error.object[error.start]:02x}, {error.reason})"
    return DataError(f"not UTF-8 {place}. Convert it, as iconv does, or leave it out", path=path, row=row)


def _text_of(line: str, text_field: str) -> str:
    """Return the text in a line of JSON, empty for null; raise a ValueError if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object: each line must be an object with a field of text")
    text = row.get(text_field, 0)
    if text is None:
        return ""
    if not isinstance(text, str):
        fields = ", ".join(map(repr, row))[:400]
        raise ValueError(f"no text in a field {text_field!r}. The fields are: {fields}; set --text_field")
    if not text.isascii():
        text.encode("utf-8")  # raises a UnicodeEncodeError for half of a surrogate pair, which JSON can contain
    return text
