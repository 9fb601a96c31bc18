"""Readers of documents in text files: whole files, JSON lines and JSON arrays, which may be compressed.

Readers yield a record that cannot be read as a document with a `fault`; `read_part` stops there or counts it.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, pairwise
from typing import Any, NamedTuple

import numpy as np

from pretraining.errors import DataError
from pretraining.tools.prepare.packed_files import InputFile, open_unpacked

PIECE_CHARACTERS = 1 << 19
"""Longest text encoded in one call; longer documents are cut."""
LARGEST_VALUE_CHARACTERS = 1 << 28
"""Limit of a value of a JSON array, so that a missing quote does not read a large file into memory."""
_JSON_BLOCK = 1 << 16

# A cut here changes no token. Byte-level BPE first splits text into words. In the usual rules (GPT-2, cl100k, Llama 3),
# no word continues from a letter or digit into white space, and no rule looks back.
_SAFE_CUT = re.compile(r"(?<=[^\W_])(?=\s)")
_CUT_SEARCH_CHARACTERS = 1 << 16
_NO_TEXT: str | list[Any] = ""
_BETWEEN_VALUES = re.compile(r"[\s,]*")


class Document(NamedTuple):
    """A document, or a part of a long text file.

    Attributes:
        content: text, token ids [T] of any integer type, or the messages of a chat.
        bytes_read: bytes read from disk for this document.
        path, row: place for messages; lines count from 1, rows of tables from 0.
        is_last_part: whether the document ends here.
        fault: why the document cannot be read; empty = it can.
        is_marked: whether the messages of a chat hold the name of a special token.
    """

    content: str | np.ndarray | list[Any]
    bytes_read: int
    path: str
    row: int | None = None
    is_last_part: bool = True
    fault: str = ""
    is_marked: bool = False

    @property
    def place(self) -> str:
        """Name of the file and row, without the folder: the same on every machine."""
        name = self.path.rpartition("/")[2]
        return name if self.row is None else f"{name}, row {self.row}"

    def error(self, text: str) -> DataError:
        """Return an error that names this document."""
        return DataError(text, path=self.path, row=self.row)


def read_text(file: InputFile) -> Iterator[Document]:
    """Yield the parts of a file that is one document; raise a DataError if it cannot be read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, unpacked, path = "", 0, str(file.path)
    with open_unpacked(file) as (stream, bytes_read):
        for block in chain(iter(partial(stream.read, PIECE_CHARACTERS), b""), [b""]):
            try:
                text += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                # `error.object` is the rest of the previous block plus this block.
                fault = _not_utf8(error, unpacked + len(block) - len(error.object), file)
                yield Document("", bytes_read(), path, fault=fault)
                return
            text = text if unpacked else text.removeprefix("\ufeff")
            unpacked += len(block)
            while len(text) > PIECE_CHARACTERS:
                end = end_of_piece(text, 0, PIECE_CHARACTERS)
                yield Document(text[:end], bytes_read(), path, is_last_part=False)
                text = text[end:]
        yield Document(text, bytes_read(), path)


def read_lines(file: InputFile, text_field: str, begin: int = 0, end: int | None = None) -> Iterator[Document]:
    """Yield a document per line of JSON lines; skip blank lines.

    Args:
        begin: first byte; a line is read if it begins in [begin, end). 0 for compressed files.
        end: byte after the last; None = end of the file.

    Raises:
        DataError: the file cannot be read or unpacked.
    """
    offset, path = 0, str(file.path)
    with open_unpacked(file, begin) as (stream, bytes_read):
        if begin:  # a line that begins earlier belongs to another part
            offset = begin - 1 + len(stream.readline())
            path = f"{path} from byte {offset:,}"
        for number, line in enumerate(stream, start=1):
            if end is not None and offset >= end:
                return
            text, fault = _NO_TEXT, ""
            try:
                decoded = line.decode("utf-8").removeprefix("\ufeff")
                is_blank = not decoded or decoded.isspace()
                text = _NO_TEXT if is_blank else text_of(json.loads(decoded), text_field)
            except UnicodeDecodeError as error:
                is_blank, fault = False, _not_utf8(error, offset, file)
            except (json.JSONDecodeError, RecursionError) as error:
                fault = f"not valid JSON ({error})"
            except ValueError as error:
                fault = str(error)
            offset += len(line)
            if not is_blank:
                yield Document(text, bytes_read(), path, number, True, fault)


def ranges_of_lines(file: InputFile, wanted_bytes: int) -> list[tuple[int, int | None, int]]:
    """Cut an uncompressed file of JSON lines into ranges (begin, end, bytes) of about `wanted_bytes`."""
    return [(begin, end, end - begin) for begin, end in even_cuts(file.size, -(-file.size // wanted_bytes))]


def even_cuts(length: int, pieces: int) -> list[tuple[int, int]]:
    """Return (begin, end) of `pieces` almost equal ranges of a length."""
    return list(pairwise(length * i // pieces for i in range(pieces + 1)))


def read_json_values(file: InputFile, text_field: str) -> Iterator[Document]:
    """Yield a document per object of a JSON array, or per object of a file that has one after another.

    Rows count the objects from 1.

    Raises:
        DataError: the file cannot be read or unpacked, or is not UTF-8 or JSON.
    """
    path = str(file.path)
    with open_unpacked(file) as (stream, bytes_read):
        values = _json_values(io.TextIOWrapper(stream, "utf-8-sig").read)
        for number in count(1):
            try:
                value = next(values)
            except StopIteration:
                return
            except ValueError as error:
                raise DataError(f"not valid JSON ({error})", path=path, row=number) from error
            text, fault = _NO_TEXT, ""
            try:
                text = text_of(value, text_field)
            except ValueError as error:
                fault = str(error)
            yield Document(text, bytes_read(), path, number, fault=fault)


def end_of_piece(text: str, begin: int, longest: int) -> int:
    """Return the end of a piece that starts at `begin`: between words if possible, at most `longest` characters."""
    end = begin + longest
    cuts = [match.start() for match in _SAFE_CUT.finditer(text, max(begin + 1, end - _CUT_SEARCH_CHARACTERS), end)]
    return cuts[-1] if cuts else end


def _not_utf8(error: UnicodeDecodeError, offset: int, file: InputFile) -> str:
    """Return the problem of bytes that begin at an offset of the unpacked file."""
    unpacked = " of the unpacked text" if file.compression else ""
    place = f"at byte {offset + error.start:,}{unpacked} (0x{error.object[error.start]:02x}, {error.reason})"
    return f"not UTF-8 {place}. Convert it, as iconv does, or leave it out"


# JSON


def text_of(record: Any, text_field: str) -> str | list[Any]:
    """Return the text or the chat in a JSON object, empty for null; raise a ValueError if there is none."""
    if not isinstance(record, dict):
        raise ValueError(f"it is {_describe(record)}, not a JSON object with a field of text")
    text = _value_at(record, text_field)
    if isinstance(text, str):
        if fault := unicode_fault(text):
            raise ValueError(fault)
        return text
    if text is None:
        return ""
    if text is record:
        names = ", ".join(map(repr, record))[:400]
        raise ValueError(f"no field {text_field!r}. The fields are: {names}; set --text_field")
    if is_chat(text):
        return list(text)
    raise ValueError(f"field {text_field!r} holds {_describe(text)}, not text. {_remedy(text, text_field)}")


def _value_at(record: dict[str, Any], field: str) -> Any:
    """Return the value of a field, or of a dotted path into nested objects; the record itself if there is none."""
    if field in record:
        return record[field]
    head, _, rest = field.partition(".")
    if not rest or head not in record:
        return record
    inner = record[head]
    value = _value_at(inner, rest) if isinstance(inner, dict) else inner
    return None if inner is None else record if value is inner else value


def is_chat(value: Any) -> bool:
    """Return whether a JSON value is a list of messages, objects with a role."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def unicode_fault(text: str) -> str:
    """Return what is wrong with a text that has no form in UTF-8; empty for others."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"its text has half of a surrogate pair (\\u{ord(text[error.start]):04x}), which is not Unicode"
    return ""


def _json_values(read: Callable[[int], str]) -> Iterator[Any]:
    """Yield the values of a JSON array, or one value after another; raise a ValueError for other text."""
    decoder, text, at = json.JSONDecoder(), read(_JSON_BLOCK), 0
    begin = _BETWEEN_VALUES.match(text, 0)
    at = begin.end() if begin else 0
    is_array = text.startswith("[", at)
    at += is_array
    while True:
        between = _BETWEEN_VALUES.match(text, at)
        at = between.end() if between else at
        if is_array and text.startswith("]", at):
            rest = chain([text[at + 1 :]], iter(partial(read, _JSON_BLOCK), ""))
            if any(block and not block.isspace() for block in rest):
                raise ValueError("text follows the array; jq -c '.[]' makes JSON lines of several arrays")
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            left = len(text) - at
            more = read(max(_JSON_BLOCK, left)) if left < LARGEST_VALUE_CHARACTERS else ""
            if not more and not left and not is_array:
                return
            if not more:
                raise ValueError(str(error)) from error
            text, at = text[at:] + more, 0
            continue
        yield value
        at = end


def _describe(value: Any) -> str:
    """Return what a JSON value is."""
    if isinstance(value, dict):
        return f"an object with the fields {', '.join(map(repr, value))[:200] or 'none'}"
    return json.dumps(value)[:60]


def _remedy(value: Any, text_field: str) -> str:
    """Return what to do with a JSON value that is no text."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys():
        role = '{human: "user", gpt: "assistant"}[.from] // .from'
        return f"jq makes a chat of it: jq -c '.[{json.dumps(text_field)}] |= map({{role: ({role}), content: .value}})'"
    return "Set another --text_field; --text_field=a.b reads the field b of an object a"
