"""Text on disk as a stream of documents: which files there are, in which order, and what is in them.

    inputs (files, folders, globs) --list_files--> [TextFile] --read_pieces--> Piece, Piece, …

The order is a function of the inputs and the files' names only, never of the file system's. A `.jsonl` file holds a
document a line, any other file is one document; `.gz` in front of either is unpacked on the way. A document longer
than half a million characters comes in several pieces, so that a file of any size passes through a bounded amount of
memory.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pretraining.errors import DataError

PIECE_CHARACTERS = 1 << 19
"""Longest text handed on at once; a longer document is cut."""

# Where a cut changes no token: byte-level BPE splits text into words first, and none of the usual rules (GPT-2, cl100k,
# Llama 3) has a word that goes on from a letter or digit into white space, or that looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class TextFile:
    """A file of documents.

    Attributes:
        path: where it is.
        name: path below the input that it was found under, with `/`: the same on every machine.
        size: bytes on disk.
    """

    path: Path
    name: str
    size: int

    @property
    def compressed(self) -> bool:
        """Whether the file is gzip."""
        return self.name.lower().endswith(".gz")

    @property
    def has_document_per_line(self) -> bool:
        """Whether each line is a JSON object with a document in it."""
        return self.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one.

    Attributes:
        file: that it is from.
        text: at most `PIECE_CHARACTERS` characters.
        ends_document: whether the next piece begins another document.
        bytes_read: bytes of the file on disk that were read for it; together at most the file's size.
    """

    file: TextFile
    text: str
    ends_document: bool
    bytes_read: int


def list_files(inputs: Sequence[str], extensions: Sequence[str]) -> list[TextFile]:
    """Find the files of some inputs: in the order of the inputs, inside a folder or glob by name, each file once.

    Args:
        inputs: files, folders (walked to the bottom, following links, passing hidden names over) and globs.
        extensions: endings, without the first dot, of the files to take from folders.

    Raises:
        DataError: an input does not exist, cannot be read, or matches no file.
    """
    files: list[TextFile] = []
    seen: set[tuple[int, int]] = set()
    for given in inputs:
        before = len(files)
        try:
            found = [(path, name, path.stat()) for path, name in _paths_of(given, extensions)]
        except OSError as error:
            raise DataError(
                f"{error.filename or given} cannot be read: {error.strerror}. Mend it (a broken link? permissions?) or "
                "give another --input_path"
            ) from error
        for path, name, status in found:
            identity = (status.st_dev, status.st_ino)
            if not stat.S_ISREG(status.st_mode) or (identity in seen and status.st_ino):
                continue
            seen.add(identity)
            files.append(TextFile(path, name, status.st_size))
        if len(files) == before:
            endings = ", ".join(f".{extension}" for extension in extensions)
            raise DataError(
                f"{given} holds no text that is not listed already. Folders are searched for {endings}; --extensions "
                "changes that"
            )
    return files


def fingerprint(files: Sequence[TextFile]) -> str:
    """A hash of names, sizes and order: what an input is recognised by without reading it."""
    listing = "".join(f"{file.name}\0{file.size}\n" for file in files)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def read_pieces(file: TextFile, text_field: str = "text") -> Iterator[Piece]:
    """Read the documents of a file.

    Args:
        file: one of `list_files`.
        text_field: key of the text in the objects of a `.jsonl` file.

    Raises:
        DataError: the file cannot be read, is not UTF-8, gzip or JSON lines with that field; says where.
    """
    try:
        with file.path.open("rb") as raw:
            stream: BinaryIO = gzip.GzipFile(fileobj=raw) if file.compressed else raw  # type: ignore[assignment]
            documents = (
                _read_lines(file, stream, text_field) if file.has_document_per_line else _read_whole(file, stream)
            )
            reported = 0
            for text, ends_document in documents:
                position = min(raw.tell(), file.size)
                yield Piece(file, text, ends_document, position - reported)
                reported = position
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{file.path} is no complete gzip file ({error}). Fetch it again, or unpack it and give the unpacked file"
        ) from error
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror or error}") from error


def _paths_of(given: str, extensions: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Paths of one input with their names below it."""
    path = Path(given).expanduser()
    if path.is_dir():
        yield from _walk(path, tuple(f".{extension.lower().lstrip('.')}" for extension in extensions))
    elif path.exists():
        yield path, path.name
    elif any(character in given for character in "*?["):
        # Names start below the last folder without a wildcard.
        fixed = path
        while any(character in str(fixed) for character in "*?["):
            fixed = fixed.parent
        # Unlike Path.glob, glob.glob takes absolute patterns and passes hidden names over.
        for match in sorted(Path(found) for found in glob.glob(str(path), recursive=True)):  # noqa: PTH207
            if not match.is_dir():
                yield match, match.relative_to(fixed).as_posix()
    else:
        raise DataError(f"--input_path: there is no file or folder {path.absolute()}")


def _walk(root: Path, endings: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Files below a folder with one of the endings, sorted by path."""

    def refuse(error: OSError) -> None:  # os.walk passes over what it cannot read unless told otherwise
        raise error

    found: list[Path] = []
    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in visited:  # a link back to a folder above
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found.extend(
            Path(folder, name) for name in names if not name.startswith(".") and name.lower().endswith(endings)
        )
    for path in sorted(found):
        yield path, path.relative_to(root).as_posix()


def _read_whole(file: TextFile, stream: BinaryIO) -> Iterator[tuple[str, bool]]:
    """One document: the whole stream, as pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, bytes_read, begun = "", 0, False
    while True:
        block = stream.read(PIECE_CHARACTERS)
        bytes_read += len(block)
        try:
            text += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The decoder's object is what was left of the last block and this one.
            raise _not_utf8(file, bytes_read - len(error.object) + error.start, error) from error
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        while len(text) > PIECE_CHARACTERS:
            cut = _cut(text[:PIECE_CHARACTERS])
            yield text[:cut], False
            text = text[cut:]
        if not block:
            yield text, True
            return


def _read_lines(file: TextFile, stream: BinaryIO, text_field: str) -> Iterator[tuple[str, bool]]:
    """A document a line; blank lines are passed over."""
    offset = 0
    for number, line in enumerate(stream, start=1):
        try:
            decoded = line.decode("utf-8").removeprefix("\ufeff" if number == 1 else "")
        except UnicodeDecodeError as error:
            raise _not_utf8(file, offset + error.start, error, number) from error
        offset += len(line)
        if not decoded.strip():
            continue
        text = _text_of(f"{file.path}, line {number}", decoded, text_field)
        while len(text) > PIECE_CHARACTERS:
            cut = _cut(text[:PIECE_CHARACTERS])
            yield text[:cut], False
            text = text[cut:]
        yield text, True


def _text_of(place: str, line: str, text_field: str) -> str:
    """The text in one line of JSON."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON object with the text in a field is expected, this is a {type(row).__name__}")
    if text_field not in row:
        fields = ", ".join(repr(key) for key in list(row)[:10]) or "none"
        raise DataError(
            f"{place}: no field {text_field!r}. The fields are: {fields}; name the one with the text by --text_field"
        )
    text = row[text_field]
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


def _cut(text: str) -> int:
    """Where to cut a text that is too long: near its end, where no word goes across."""
    start = max(0, len(text) - _CUT_SEARCH_CHARACTERS)
    cuts = [match.start() for match in _SAFE_CUT.finditer(text, start)]
    return cuts[-1] if cuts else len(text)


def _not_utf8(file: TextFile, offset: int, error: UnicodeDecodeError, line: int | None = None) -> DataError:
    place = f", line {line}" if line is not None else ""
    unpacked = " of the unpacked text" if file.compressed else ""
    return DataError(
        f"{file.path}{place}: not UTF-8 at byte {offset:,}{unpacked} (0x{error.object[error.start]:02x}, "
        f"{error.reason}). Convert it"
        " (for Latin-1: iconv -f latin1 -t utf-8) or leave it out; besides plain text only .jsonl and .gz files are "
        "read"
    )
