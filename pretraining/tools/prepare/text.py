"""Text files and JSON lines as pieces, unpacked on the way.

A piece is a document, or a part of a long one. A text longer than half a million characters comes in several pieces, so
that a text of any length takes a bounded amount of memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from pretraining.errors import DataError
from pretraining.tools.prepare.inputs import InputFile

PIECE_CHARACTERS = 1 << 19
"""Longest text handed on at once; a longer document is cut."""

# Where a cut changes no token: byte-level BPE splits text into words first, and none of the usual rules (GPT-2, cl100k,
# Llama 3) has a word that goes on from a letter or digit into white space, or that looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = 1 << 16
_USUAL_SEARCH_CHARACTERS = 1 << 8
_FORMATS = {"gz": "gzip", "zst": "zstd"}
_UNPACKED_BYTES = 1 << 18


class Piece(NamedTuple):
    """A document, or a part of one.

    Attributes:
        content: text, at most `PIECE_CHARACTERS` characters; or a whole document's token ids, [T] of any integer type.
        ends_document: whether the next piece begins another document.
        bytes_read: bytes of the input on disk that were read for it.
        place: where the document is, for messages.
    """

    content: str | np.ndarray
    ends_document: bool
    bytes_read: int
    place: str


def read_text(file: InputFile) -> Iterator[Piece]:
    """Reads a file as one document; a DataError says where it cannot be read or unpacked, or is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, unpacked, begun = "", 0, False
    try:
        with _open(file) as (stream, bytes_read):
            while True:
                block = stream.read(PIECE_CHARACTERS)
                unpacked += len(block)
                try:
                    text += decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    # The decoder's object is what was left of the last block and this one.
                    raise _not_utf8(file, unpacked - len(error.object) + error.start, error) from error
                if not begun and text:
                    text, begun = text.removeprefix("\ufeff"), True
                while len(text) > PIECE_CHARACTERS:
                    head, text = cut_once(text)
                    yield Piece(head, False, bytes_read(), str(file.path))
                if not block:
                    yield Piece(text, True, bytes_read(), str(file.path))
                    return
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error, f"after {unpacked:,} bytes of text") from error


def read_lines(file: InputFile, text_field: str, begin: int = 0, end: int | None = None) -> Iterator[Piece]:
    """Reads a file with a document a line; blank lines are skipped.

    Args:
        begin: the lines that begin at this byte or later are read; 0 where the file is compressed.
        end: and before this one; None = to the end.

    Raises:
        DataError: the file cannot be read or unpacked, or is not UTF-8 or JSON lines with that field; says where.
    """
    number = offset = 0
    try:
        with _open(file, begin) as (stream, bytes_read):
            if begin:  # a line that begins before it is another part's
                offset = begin - 1 + len(stream.readline())
            for line in stream:
                if end is not None and offset >= end:
                    return
                number += 1
                place = f"{file.path}, line {number}" if not begin else f"{file.path}, the line at byte {offset:,}"
                try:
                    decoded = line.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, offset + error.start, error, place) from error
                offset += len(line)
                if decoded.strip():
                    for text, ends in cut_text(_text_of(place, decoded, text_field)):
                        yield Piece(text, ends, bytes_read(), place)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(file, error, f"after {offset:,} bytes of text") from error


def cut_text(text: str) -> Iterator[tuple[str, bool]]:
    """A whole document's text in pieces, and whether each is the last; an empty text is one empty piece."""
    while len(text) > PIECE_CHARACTERS:
        head, text = cut_once(text)
        yield head, False
    yield text, True


def cut_once(text: str) -> tuple[str, str]:
    """A text that is longer than a piece as its first piece, ending where no word goes across, and the rest."""
    for searched in (_USUAL_SEARCH_CHARACTERS, _CUT_SEARCH_CHARACTERS):
        start = max(0, PIECE_CHARACTERS - searched)
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, start, PIECE_CHARACTERS)]
        if cuts:
            return text[: cuts[-1]], text[cuts[-1] :]
    return text[:PIECE_CHARACTERS], text[PIECE_CHARACTERS:]


@contextmanager
def _open(file: InputFile, begin: int = 0) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The unpacked bytes from `begin` on, and a function that counts bytes on disk since it was last called."""
    with file.path.open("rb") as raw:
        if begin:
            raw.seek(begin - 1)
        counted = begin

        def bytes_read() -> int:
            nonlocal counted
            before, counted = counted, max(counted, min(raw.tell(), file.size))
            return counted - before

        if file.compression == "gz":
            unpacked = gzip.GzipFile(fileobj=raw)
            yield io.BufferedReader(unpacked, _UNPACKED_BYTES), bytes_read
        elif file.compression == "zst":
            packed = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
            yield io.BufferedReader(packed, _UNPACKED_BYTES), bytes_read
        else:
            yield raw, bytes_read


def _text_of(place: str, line: str, text_field: str) -> str:
    """The text in one line of JSON; a missing one (null) is empty."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object with the text in a field is expected, this is a {type(row).__name__}")
    if text_field not in row:
        fields = ", ".join(repr(key) for key in list(row)[:10]) or "none"
        raise DataError(
            f"{place}: no field {text_field!r}. The fields are: {fields}; name the one with the text by --text_field"
        )
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"{place}: field {text_field!r} must be a string, this is {json.dumps(text)[:40]}. Name another one by "
            "--text_field or drop the line"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        raise DataError(
            f"{place}: field {text_field!r} has half of a surrogate pair at character {error.start}. Mend or drop the "
            "line"
        ) from error
    return text


def _not_utf8(file: InputFile, offset: int, error: UnicodeDecodeError, place: str | None = None) -> DataError:
    unpacked = " of the unpacked text" if file.compression else ""
    return DataError(
        f"{place or file.path}: not UTF-8 at byte {offset:,}{unpacked} (0x{error.object[error.start]:02x}, "
        f"{error.reason}). Convert it (for Latin-1: iconv -f latin1 -t utf-8) or leave it out; besides plain text only "
        "JSON lines (.jsonl), .parquet, .arrow, .feather, and .gz and .zst files are read"
    )


def _unreadable(file: InputFile, error: Exception, place: str) -> DataError:
    """What the system or a decompressor says, in words for users."""
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{file.path} cannot be read: {error.strerror}")
    if file.compression is None:
        return DataError(f"{file.path} cannot be read: {error}")
    return DataError(
        f"{file.path} is no complete {_FORMATS[file.compression]} file: {place}, {error}. Fetch it again, or unpack it "
        "and give the unpacked file"
    )
