"""The input cut into units: what processes and machines share out, and where a call goes on after a stop.

    config --find_input--> Input: units --read_part--> documents

A unit is about 256 MB of the input: many small files, or a range of a large one where that can be cut (tables, and
JSON lines that are not compressed). The cuts are a function of the input's names and sizes alone. So the token files of
a unit are the same on any process, after any number of interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pretraining.config.commands import PrepareConfig
from pretraining.tools.prepare.documents import Document, read_lines, read_text
from pretraining.tools.prepare.hub import HubSplit, column_type_of, read_shards, shards_of
from pretraining.tools.prepare.inputs import InputFile, even_cuts, fingerprint, list_files, standard_library_files
from pretraining.tools.prepare.tables import column_type, ranges_of_table, read_table, token_type

UNIT_BYTES = 1 << 28
"""Input of a unit, in bytes on disk: a token file of some hundred megabytes, encoded by eight cores in ten seconds."""


@dataclass(frozen=True)
class Part:
    """A file or a split of a Hugging Face dataset, or a range of it.

    Attributes:
        begin: byte (JSON lines), row group (Parquet), record batch (Arrow), shard or row (Hugging Face).
        end: the one after the last; None = to the end.
        size: bytes on disk; 0 where that is unknown.
        version: of the source, where name and size do not tell.
    """

    source: InputFile | HubSplit
    begin: int
    end: int | None
    size: int
    version: str = ""

    @property
    def name(self) -> str:
        """The same on every machine."""
        name = self.source.name if isinstance(self.source, InputFile) else f"{self.source}\0{self.version}"
        return name if (self.begin, self.end) == (0, None) else f"{name}\0{self.begin}-{self.end}"

    @property
    def is_plain(self) -> bool:
        """Whether the size is that of text."""
        source = self.source
        return isinstance(source, InputFile) and source.kind in ("text", "lines") and source.compression is None


@dataclass(frozen=True)
class Unit:
    """Some parts, at least one, one after the other; numbered from 0 in the order of the input."""

    number: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Return its bytes on disk."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class Input:
    """Everything that is to be read.

    Attributes:
        token_type: of the token ids that it holds; None where it holds text.
        settings: what the dataset depends on besides the tokenizer, for prepare.json.
    """

    units: tuple[Unit, ...]
    size: int
    token_type: pa.DataType | None
    settings: dict[str, Any]


def find_input(config: PrepareConfig) -> Input:
    """Find what the settings name, and cut it.

    Raises:
        DataError: there is nothing to read, or it cannot be read.
    """
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
        settings["vocab_size"] = config.vocab_size  # of text it is the tokenizer's
    return Input(tuple(cut_units(parts)), size, tokens, settings)


def read_part(part: Part, text_field: str) -> Iterator[Document]:
    """Read the documents of a part; a DataError says where it cannot be read."""
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
    """Put neighbouring parts together while they fit into a unit; a part of unknown size is a unit by itself."""
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
    """Cut a file into ranges if it is large and can be cut."""
    if file.size > UNIT_BYTES and file.kind == "lines" and file.compression is None:
        cuts = even_cuts(file.size, -(-file.size // UNIT_BYTES))
        return [Part(file, begin, end, end - begin) for begin, end in cuts]
    if file.size > UNIT_BYTES and file.kind in ("parquet", "arrow"):
        return [Part(file, *bounds) for bounds in ranges_of_table(file, UNIT_BYTES)]
    return [Part(file, 0, None, file.size)]


def _token_type_of(files: list[InputFile], column: str) -> pa.DataType | None:
    """Return the type of the token ids in the files, from the first table; None if they hold text."""
    table = next((file for file in files if file.kind in ("parquet", "arrow")), None)
    return None if table is None else token_type(column_type(table, column), column, table.path)
