"""Units of the input: the pieces of work that processes share, and that survive an interruption.

    config --find_input--> Input: units --read_part--> documents

A unit is about 256 MB of input: many small files, or a range of a large table or of uncompressed JSON lines. The cuts
depend only on names and sizes of the input, so the token files of a unit are the same on every process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pretraining.tools.commands import PrepareConfig
from pretraining.tools.prepare.documents import Document, read_lines, read_text
from pretraining.tools.prepare.hub import HubSplit, column_type_of, read_shards, shards_of
from pretraining.tools.prepare.inputs import InputFile, even_cuts, fingerprint, list_files, standard_library_files
from pretraining.tools.prepare.tables import column_type, ranges_of_table, read_table, token_type

UNIT_BYTES = 1 << 28
"""Input of a unit in bytes on disk; eight cores encode a unit in about ten seconds."""


@dataclass(frozen=True)
class Part:
    """A file or a split of a Hugging Face dataset, or a range of it.

    Attributes:
        begin: byte (JSON lines), row group (Parquet), record batch (Arrow), shard or row (Hugging Face).
        end: end of the range, excluded; None = end of the source.
        size: bytes on disk; 0 if unknown.
        version: hash of the version of a Hugging Face dataset.
    """

    source: InputFile | HubSplit
    begin: int
    end: int | None
    size: int
    version: str = ""

    @property
    def name(self) -> str:
        """Name of the part, the same on every machine."""
        name = self.source.name if isinstance(self.source, InputFile) else f"{self.source}\0{self.version}"
        return name if (self.begin, self.end) == (0, None) else f"{name}\0{self.begin}-{self.end}"

    @property
    def is_plain(self) -> bool:
        """Whether `size` is the size of the text."""
        source = self.source
        return isinstance(source, InputFile) and source.kind in ("text", "lines") and source.compression is None


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
        settings: everything besides the tokenizer that the dataset depends on, for prepare.json.
    """

    units: tuple[Unit, ...]
    size: int
    token_type: pa.DataType | None
    settings: dict[str, Any]


def find_input(config: PrepareConfig) -> Input:
    """Find the input that the settings name and cut it into units; raise a DataError if it cannot be read."""
    column = config.text_field
    if config.hf_dataset is not None:
        split = HubSplit(config.hf_dataset, config.hf_config, config.hf_split)
        ranges, recognised_by = shards_of(split, UNIT_BYTES)
        parts = [Part(split, *bounds, recognised_by) for bounds in ranges]
        count, has_fields = len(parts), True
        tokens = token_type(column_type_of(split, column), column, str(split))
    else:
        stdlib = config.source == "stdlib"
        files = standard_library_files() if stdlib else list_files(config.input_path, config.extensions)
        parts = [part for file in files for part in _parts_of(file)]
        tokens = _token_type_of(files, column)
        count, recognised_by = len(files), fingerprint([(file.name, file.size) for file in files])
        has_fields = any(file.kind != "text" for file in files)
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
    return Input(tuple(cut_units(parts)), size, tokens, settings)


def read_part(part: Part, text_field: str) -> Iterator[Document]:
    """Yield the documents of a part; raise a DataError if it cannot be read."""
    source = part.source
    if isinstance(source, HubSplit):
        assert part.end is not None
        return read_shards(source, text_field, part.begin, part.end, part.size)
    if source.kind == "text":
        return read_text(source)
    if source.kind == "lines":
        return read_lines(source, text_field, part.begin, part.end)
    return read_table(source, text_field, part.begin, part.end)


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
    if file.size > UNIT_BYTES and file.kind == "lines" and file.compression is None:
        cuts = even_cuts(file.size, -(-file.size // UNIT_BYTES))
        return [Part(file, begin, end, end - begin) for begin, end in cuts]
    if file.size > UNIT_BYTES and file.kind in ("parquet", "arrow"):
        return [Part(file, *bounds) for bounds in ranges_of_table(file, UNIT_BYTES)]
    return [Part(file, 0, None, file.size)]


def _token_type_of(files: list[InputFile], column: str) -> pa.DataType | None:
    """Return the type of the token ids in the first table; None if the files hold text."""
    table = next((file for file in files if file.kind in ("parquet", "arrow")), None)
    return None if table is None else token_type(column_type(table, column), column, table.path)
