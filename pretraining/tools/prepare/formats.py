"""Formats of input files: a row each, for those that are read and those that are refused.

    first bytes --> compression --> unpacked first bytes --> the row of `FORMATS` that they match, else that of the name

The content decides. The name of a file decides only between formats that look alike at the beginning. A new format is a
row: how to recognise it, and its reader or the command that makes it readable.
"""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pretraining.errors import DataError
from pretraining.files import LFS_POINTER, LFS_REMEDY
from pretraining.tools.command_settings import COMPRESSED_ENDINGS
from pretraining.tools.prepare.documents import Document, ranges_of_lines, read_json_values, read_lines, read_text
from pretraining.tools.prepare.packed_files import InputFile, compression_of, open_unpacked
from pretraining.tools.prepare.tables import ARROW, PARQUET, ranges_of_table, read_table

HEAD_BYTES = 1 << 16
_LONGEST_FIRST_LINE = 1 << 26
_ZERO_BYTES_ONE_IN = 8
"""Share of zero bytes above which a file is no text in UTF-8: English in UTF-16 has one in two."""
_JSON_ARRAY = re.compile(rb"\s*\[\s*\{\s*[\"}]")
BOM = b"\xef\xbb\xbf"

Reader = Callable[..., Iterator[Document]]
"""Takes a file, the field of the text and, if the format has ranges, one: bytes, row groups or record batches."""


@dataclass(frozen=True)
class Format:
    """A format of input files.

    Attributes:
        name: name in messages, after "it is".
        matches: whether the first bytes (`HEAD_BYTES`, or to the end of the first line) are of this format.
        endings: endings of names, without those of compressions, if the content matches no format.
        read: reader; None = refused with the remedy.
        ranges: cuts a large uncompressed file into (begin, end, bytes); None = it is not cut.
        is_text: whether the format is text, which can be compressed, and be taken as one document.
        remedy: command that makes it readable; {file} and {folder} stand for the path, quoted, without and with ending.
    """

    name: str
    matches: Callable[[bytes], bool] | None = None
    endings: tuple[str, ...] = ()
    read: Reader | None = None
    ranges: Callable[[InputFile, int], list[tuple[int, int | None, int]]] | None = None
    is_text: bool = False
    remedy: str = ""

    @property
    def has_fields(self) -> bool:
        """Whether a file holds many documents, in the field `--text_field`; otherwise it is one document."""
        return self.read is not None and self.name != TEXT


TEXT, JSON = "text", "JSON"


def _recode(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 {{file}} > {{folder}}.utf8.txt"


def _to_parquet(options: str) -> str:
    """Return the remedy for a table in text; without these options, pandas guesses types and drops texts like NA."""
    read = f"pandas.read_csv(sys.argv[1], {options}dtype=str, keep_default_na=False)"
    program = f"import sys, pandas; {read}.to_parquet(sys.argv[2])"
    return f'Make Parquet of it: python -c "{program}" {{file}} {{folder}}.parquet'


def _are_json_lines(head: bytes) -> bool:
    """Return whether two lines begin like JSON objects, and one of them is one: the other may be damaged."""
    first, _, rest = head.removeprefix(BOM).lstrip().partition(b"\n")
    rest = rest.lstrip()
    if not first.startswith(b"{") or (rest and not rest.startswith(b"{")):
        return False
    return _is_object(first) or _is_object(rest.partition(b"\n")[0])


def _is_json_array(head: bytes) -> bool:
    return _JSON_ARRAY.match(head.removeprefix(BOM)) is not None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _starts(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(starts)


def _binary(*starts: bytes) -> Callable[[bytes], bool]:
    """Return a test for first letters with which a text may begin, too, and zero bytes, which a text does not have."""
    return lambda head: head.startswith(starts) and b"\0" in head


def _is_tar(head: bytes) -> bool:
    try:
        return b"\0" in head[:512] and bool(tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape"))
    except tarfile.HeaderError:
        return False


_TO_LINES = "make JSON lines of it, an object with the text per line"
_UNPACK = "Unpack it, and give the folder: "
FORMATS = (
    # read: the content tells
    Format(PARQUET, _binary(b"PAR1"), (".parquet",), read_table, ranges=ranges_of_table),
    Format(
        ARROW, _starts(b"ARROW1\0\0", b"\xff\xff\xff\xff"), (".arrow", ".feather"), read_table, ranges=ranges_of_table
    ),
    Format("JSON lines", _are_json_lines, (".jsonl", ".ndjson"), read_lines, ranges=ranges_of_lines, is_text=True),
    Format("a JSON array", _is_json_array, read=read_json_values, is_text=True),
    # refused: what people have, and the command that makes it readable
    Format("a Git LFS pointer", _starts(LFS_POINTER), remedy=LFS_REMEDY),
    Format("a tar archive", _is_tar, remedy=f"{_UNPACK}mkdir {{folder}} && tar -xf {{file}} -C {{folder}}"),
    Format("a zip archive", _starts(b"PK\x03\x04", b"PK\x05\x06"), remedy=f"{_UNPACK}unzip {{file}} -d {{folder}}"),
    Format("a 7z archive", _starts(b"7z\xbc\xaf\x27\x1c"), remedy=f"{_UNPACK}7z x {{file}} -o{{folder}}"),
    Format("a rar archive", _starts(b"Rar!\x1a\x07"), remedy=f"{_UNPACK}unrar x {{file}} {{folder}}/"),
    Format("compressed by brotli", endings=(".br",), remedy="Unpack it: brotli -d {file}"),
    Format("compressed by snappy", _starts(b"\xff\x06\x00\x00sNaPpY"), remedy="Unpack it: snzip -d {file}"),
    Format(
        "a WARC file",
        _starts(b"WARC/0.", b"WARC/1."),
        remedy=f"Extract its texts, for example with trafilatura, and {_TO_LINES}",
    ),
    Format("a MediaWiki dump", _starts(b"<mediawiki"), remedy="Make JSON lines of it: wikiextractor --json {file}"),
    Format("a PDF", _starts(b"%PDF-"), remedy="Extract its text: pdftotext {file}"),
    Format(
        "of a rare format (Avro, HDF5, SQLite, compress, lzip, lzop, old lz4)",
        _starts(
            b"Obj\x01", b"\x89HDF", b"SQLite format 3\0", b"\x1f\x9d", b"LZIP\x01", b"\x89LZO", b"\x02\x21\x4c\x18"
        ),
        remedy=f"Unpack it, or {_TO_LINES}",
    ),
    Format("an ORC or Feather 1 file", _binary(b"ORC", b"FEA1"), remedy="Write it again as Parquet, with pyarrow"),
    Format(
        "a NumPy file", _starts(b"\x93NUMPY"), remedy="Token ids in .npy are trained on as they are: see docs/data.md"
    ),
    Format(
        "UTF-16 or UTF-32",
        _starts(b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"),
        remedy=f"Convert it: {_recode('UTF-16')}",
    ),
    # the name tells
    Format("CSV", endings=(".csv",), is_text=True, remedy=_to_parquet("")),
    Format("TSV", endings=(".tsv",), is_text=True, remedy=_to_parquet("sep='\\t', quoting=3, ")),
    Format(JSON, endings=(".json",), read=read_json_values, is_text=True),
    Format(TEXT, endings=("",), read=lambda file, field: read_text(file), is_text=True),
)
_BINARY = Format(
    "UTF-16 without its mark, or no text",
    remedy=f"If it is text, convert it: {_recode('UTF-16LE')}; if not, leave it out",
)
_ROWS = {row.name: row for row in FORMATS}
_NAMED = [row for row in FORMATS if row.endings]


def format_of(file: InputFile) -> Format:
    """Return the row of a recognised file."""
    return _ROWS[file.format]


def recognise(path: Path, name: str, size: int, *, as_text: bool = False) -> InputFile:
    """Find the format and the compression of a file by its first bytes, else by its name.

    Args:
        as_text: take JSON, CSV and TSV as text: a file is one document.

    Raises:
        DataError: the file cannot be read, is damaged, or has a format that is not read.
        OSError: the file cannot be opened.
    """
    with path.open("rb", buffering=0) as opened:
        head = opened.read(HEAD_BYTES) or b""
    compression = compression_of(head)
    if compression is not None or _has_long_line(head):
        with open_unpacked(InputFile(path, name, size, TEXT, compression)) as (stream, _):
            head = stream.read(HEAD_BYTES)
            head += stream.readline(_LONGEST_FIRST_LINE) if _has_long_line(head) else b""
    row = _by_content(head)
    if row is None:
        row = _by_name(path, name, is_compressed=compression is not None)
        row = _BINARY if row.is_text and head.count(0) > len(head) // _ZERO_BYTES_ONE_IN else row
    if as_text and row.is_text:
        row = _ROWS[TEXT]
    inner = compression_of(head)
    if row.read is not None and (compression is None or (row.is_text and inner is None)):
        return InputFile(path, name, size, row.name, compression)
    problem = f"it is {inner or row.name}{f' inside {compression}' if compression else ''}, which is not read"
    folder = path.with_name(f"{path.name.lstrip('.')}-unpacked")
    remedy = (row.remedy or "Unpack it first").format(file=shlex.quote(str(path)), folder=shlex.quote(str(folder)))
    raise DataError(f"{problem}. {remedy}", path=path)


def _by_content(head: bytes) -> Format | None:
    """Return the format that the first bytes show, if any."""
    return next((row for row in FORMATS if row.matches is not None and row.matches(head)), None)


def _by_name(path: Path, name: str, *, is_compressed: bool) -> Format:
    """Return the format that a name says; raise a DataError if it says that the file is compressed, and it is not."""
    name = name.lower()
    if name.endswith(COMPRESSED_ENDINGS):
        ending = max((ending for ending in COMPRESSED_ENDINGS if name.endswith(ending)), key=len)
        if not is_compressed:
            problem = f"it is empty or damaged: its name ends with {ending}, but it is not compressed"
            raise DataError(f"{problem}. Fetch it again; if it is plain text, rename it", path=path)
        name = name.removesuffix(ending)
    return next(row for row in _NAMED if name.endswith(row.endings))


def _has_long_line(head: bytes) -> bool:
    """Return whether the first bytes may belong to JSON lines whose first line is longer."""
    return len(head) == HEAD_BYTES and b"\n" not in head.lstrip() and head.removeprefix(BOM).lstrip()[:1] == b"{"
