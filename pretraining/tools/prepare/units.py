"""Units of the input: the pieces of work that processes share, and that survive an interruption.

    config --find_input--> Input: units --read_part--> documents

A unit is about 256 MB of input: many small files, or a range of a large table or of uncompressed JSON lines. The cuts
depend only on names and sizes of the input, so the token files of a unit are the same on every process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pretraining.errors import DataError
from pretraining.tools.command_settings import PrepareConfig
from pretraining.tools.prepare.documents import Document, even_cuts
from pretraining.tools.prepare.formats import format_of
from pretraining.tools.prepare.hub import HubSplit, column_type_of, local_files, read_shards, shards_of
from pretraining.tools.prepare.inputs import Selection, fingerprint, list_files, standard_library_files
from pretraining.tools.prepare.packed_files import InputFile
from pretraining.tools.prepare.tables import ARROW, PARQUET, column_type, holds_chats, token_type

log = logging.getLogger(__name__)

_JSON_OF_CHAT = re.compile(r'\s*\[\s*\{\s*"(role|content|from|value)"\s*:')
_LEAVE_OUT = "To leave out what cannot be read, give --bad_records=skip"
Render = Callable[[Document], Document]
"""Makes text of a chat."""
UNIT_BYTES = 1 << 28
"""Input of a unit in bytes on disk; eight cores encode a unit in about ten seconds."""


class RawRange(NamedTuple):
    """Bytes [begin, end) of a file on disk."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class Part:
    """A file or a split of a Hugging Face dataset, or a range of it.

    Attributes:
        begin: byte (JSON lines), row group (Parquet), record batch (Arrow), shard or row (Hugging Face).
        end: end of the range, excluded; None = end of the source.
        size: bytes on disk; 0 if unknown.
        version: hash of the version of a Hugging Face dataset.
        raw: its share of the bytes of the input, whose content is recorded; none for a dataset on the Hub.
    """

    source: InputFile | HubSplit
    begin: int
    end: int | None
    size: int
    version: str = ""
    raw: tuple[RawRange, ...] = ()

    @property
    def source_name(self) -> str:
        """Name of the file or split for messages."""
        return self.source.name if isinstance(self.source, InputFile) else str(self.source)

    @property
    def name(self) -> str:
        """Name of the part, the same on every machine."""
        name = self.source.name if isinstance(self.source, InputFile) else f"{self.source}\0{self.version}"
        return name if (self.begin, self.end) == (0, None) else f"{name}\0{self.begin}-{self.end}"

    @property
    def is_plain(self) -> bool:
        """Whether `size` is the size of the text."""
        source = self.source
        return isinstance(source, InputFile) and format_of(source).is_text and source.compression is None


@dataclass(frozen=True)
class Unit:
    """One or more consecutive parts; `number` counts units from 0 in the order of the input."""

    number: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Input:
    """The whole input.

    Attributes:
        token_type: type of the token ids; None if the input is text.
        settings: everything except the tokenizer that the dataset depends on, for prepare.json.
        files: input files; none for a Hugging Face dataset.
        is_chat: whether the input holds chats.
    """

    units: tuple[Unit, ...]
    size: int
    token_type: pa.DataType | None
    settings: dict[str, Any]
    files: list[InputFile]
    is_chat: bool = False

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of the input."""
        return [part for unit in self.units for part in unit.parts]


def find_input(config: PrepareConfig) -> Input:
    """Find the input that the settings name and cut it into units.

    Raises:
        DataError: it cannot be read, or does not fit --special_tokens.
    """
    column, files = config.text_field or "", list[InputFile]()
    if config.hf_dataset is not None:
        split = HubSplit(config.hf_dataset, config.hf_config, config.hf_split)
        ranges, recognised_by = shards_of(split, UNIT_BYTES)
        raw = _shares(local_files(split), len(ranges))
        parts = [Part(split, *bounds, recognised_by, share) for bounds, share in zip(ranges, raw, strict=True)]
        count, has_fields = len(parts), True
        kind = column_type_of(split, column)
        tokens, is_chat = token_type(kind, column, str(split)), holds_chats(kind)
    else:
        stdlib = config.source == "stdlib"
        selection = Selection(config.extensions, config.split, as_text=config.text_field is None)
        files = standard_library_files() if stdlib else list_files(config.input_path, selection)
        parts = [part for file in files for part in _parts_of(file)]
        tokens = _token_type_of(files, column)
        count, recognised_by = len(files), fingerprint([(file.name, file.size) for file in files])
        has_fields = any(format_of(file).has_fields for file in files)
        is_chat = has_fields and tokens is None and _begins_with_chat(parts, config)
    size = sum(part.size for part in parts)
    settings: dict[str, Any] = {
        "input_files": count,
        "input_bytes": size,
        "input_fingerprint": recognised_by,
        "text_field": column if has_fields else None,
        "tokens_per_file": config.tokens_per_file,
    }
    if tokens is not None:
        settings["vocab_size"] = config.vocab_size  # for text, the tokenizer determines it
    else:
        settings["special_tokens"] = config.special_tokens or ("ids" if is_chat else "text")
    if (config.special_tokens == "text" and is_chat) or (config.special_tokens is not None and tokens is not None):
        held = "chats, whose templates write special tokens as ids" if is_chat else "token ids"
        problem = f"--special_tokens={config.special_tokens}: --text_field={column} holds {held}. Drop the flag"
        raise DataError(problem)
    return Input(tuple(cut_units(parts)), size, tokens, settings, files, is_chat)


def _begins_with_chat(parts: list[Part], config: PrepareConfig) -> bool:
    """Return whether the first document that is not empty is a chat."""
    for part in parts:
        for document in read_part(part, config.text_field or "", skip_bad=config.bad_records == "skip"):
            if len(document.content):
                if isinstance(document.content, str) and _JSON_OF_CHAT.match(document.content):
                    log.warning("%s holds chats as strings of JSON, which are encoded as text.", document.path)
                return isinstance(document.content, list)
    return False


def read_part(
    part: Part,
    text_field: str,
    *,
    skip_bad: bool = False,
    render: Render | None = None,
) -> Iterator[Document]:
    """Yield the documents of a part.

    Args:
        render: makes text of chats.
        skip_bad: yield a record that cannot be read, too, as an empty document; its `fault` names file and row.

    Raises:
        DataError: the part cannot be read, or without `skip_bad` a record.
    """
    source = part.source
    if isinstance(source, HubSplit):
        assert part.end is not None
        documents = read_shards(source, text_field, part.begin, part.end, part.size)
    else:
        row = format_of(source)
        assert row.read is not None
        bounds = {"begin": part.begin, "end": part.end} if row.ranges is not None else {}
        documents = row.read(source, text_field, **bounds)
    for document in documents if render is None else map(render, documents):
        if document.fault:
            if not skip_bad:
                raise document.error(f"{document.fault}. {_LEAVE_OUT}")
            document = document._replace(fault=_named_fault(source, document))
        yield document


def _named_fault(source: InputFile | HubSplit, document: Document) -> str:
    """Return the fault of a record with the name of its file, which is the same on every machine."""
    place = document.path
    if isinstance(source, InputFile):
        place = source.name + place.removeprefix(str(source.path))
    return f"{place}: {document.fault}" if document.row is None else f"{place}, row {document.row}: {document.fault}"


def cut_units(parts: Iterable[Part]) -> Iterator[Unit]:
    """Group consecutive parts into units of at most `UNIT_BYTES`; a part of unknown size fills a unit."""
    number, together, size = 0, list[Part](), 0
    for part in parts:
        is_unknown = part.size == 0 and isinstance(part.source, HubSplit)
        part_size = UNIT_BYTES if is_unknown else part.size
        if together and size + part_size > UNIT_BYTES:
            yield Unit(number, tuple(together))
            number, together, size = number + 1, [], 0
        together.append(part)
        size += part_size
    if together:
        yield Unit(number, tuple(together))


def _parts_of(file: InputFile) -> list[Part]:
    """Cut a file into ranges if it is large and its format allows it."""
    ranges = format_of(file).ranges
    bounds: list[tuple[int, int | None, int]] = [(0, None, file.size)]
    if ranges is not None and file.size > UNIT_BYTES and file.compression is None:
        bounds = ranges(file, UNIT_BYTES)
    raw = even_cuts(file.size, len(bounds))
    return [Part(file, *part, raw=(RawRange(file.path, *cut),)) for part, cut in zip(bounds, raw, strict=True)]


def _shares(files: list[Path], count: int) -> list[tuple[RawRange, ...]]:
    """Divide whole files among `count` parts, in order."""
    shares: list[tuple[RawRange, ...]] = [()] * count
    numbered = ((number * count // len(files), path) for number, path in enumerate(files))
    for share, group in groupby(numbered, key=lambda pair: pair[0]):
        shares[share] = tuple(RawRange(path, 0, path.stat().st_size) for _, path in group)
    return shares


def _token_type_of(files: list[InputFile], column: str) -> pa.DataType | None:
    """Return the type of the token ids in the tables; None if they hold text.

    It is the first table's type, unless that has at most 16 bits and the type of another table is wider.
    """
    widest = None
    for table in (file for file in files if file.format in (PARQUET, ARROW)):
        kind = token_type(column_type(table, column), column, table.path)
        if kind is None:  # encoding reports a mix of text and token ids
            break
        widest = kind
        if kind.bit_width > 16:
            break
    return widest
