"""Records of a prepared dataset: prepare.json, and the done files of a running call.

    <output_path>/<dataset>/prepare.json       content of the folder and its source
    <output_path>/.<dataset>.preparing/        the work folder
      plan.json, tokenizer.json, …             choices of rank 0; no tokenizer if the input holds token ids
      unit_000003.json                         a done file: unit 3 is complete; its token files, and counts
      files/part_000003_000000.arrow           the first token file of unit 3
      files/prepare.json                       written last; then `files` is renamed to the dataset's folder

A done file is written when all token files of its unit are on disk. After an interruption, a call continues with the
units that have no done file. The file `prepare.json` holds no times and no paths: the same input gives the same file.

Just before a part of the input is encoded, its content is recorded in the done file of its unit. The file prepare.json
has a digest of all records. The hidden file .inputs.json has the records, and the times of change that were seen with
them: a later call reads only the parts with another time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pretraining.data.storage.content import combine, content_record, digest_of_records, time_of_change
from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.threads import map_in_order
from pretraining.data.tokenizer import Tokenizer
from pretraining.errors import DataError
from pretraining.files import Location, entries_of, exists, is_folder, read_json, read_object, reason_of, write_atomic
from pretraining.launch.machine import usable_cores
from pretraining.text import list_some
from pretraining.tools.prepare.token_files import COLUMN, TokenFile, token_dtype
from pretraining.tools.prepare.units import Part, Unit

INPUTS_FILE = ".inputs.json"
"""Records of the input of a dataset, in its folder."""
Content = tuple[int, int]
"""Digest of the times of change of a part's files, and record of their content."""
FORMAT_VERSION = 2
"""Format of prepare.json."""
UNKNOWN_VOCABULARIES = {16: 1 << 16, 32: 1 << 32}
"""Upper bound of ids of an unknown tokenizer, by the bits that hold them."""
_RECORD_FORMAT = 5
_MOST_BAD_RECORDS = 100
"""Bad records that prepare.json names; it counts all."""

Encoder = Literal["fastokens", "tokenizers"]


@dataclass
class PrepareCounts:
    """Amounts read and written.

    Attributes:
        empty_documents: documents without text; they are not written.
        characters, text_bytes: size of the encoded text, and as UTF-8.
        input_bytes: bytes read from disk.
        bad_records: records that cannot be read and were left out.
        marked_documents: documents that hold the name of a special token; of chats, in their messages.
        lost: unknown tokens, or characters without a token: text that the tokenizer cannot encode.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    characters: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    bad_records: int = 0
    marked_documents: int = 0
    lost: int = 0

    def __add__(self, other: PrepareCounts) -> PrepareCounts:
        return PrepareCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Encoding:
    """Everything except the input that the tokens of a unit depend on.

    Attributes:
        largest_vocabulary: upper bound of ids.
        tokenizer: hash of the tokenizer; None if the input holds token ids of an unknown tokenizer.
        encoder: None if the input holds token ids. Units of one encoder are not reused for the other.
        skip_bad: whether to leave out records that cannot be read; a unit without bad records does not depend on it.
        special_tokens: what names of special tokens in texts become.
        chat_template: hash of the chat template; empty for other texts.
        now: time that the chat template writes; empty if it writes none.
    """

    text_field: str
    tokens_per_file: int
    largest_vocabulary: int
    tokenizer: str | None
    encoder: Encoder | None
    skip_bad: bool = False
    special_tokens: Literal["text", "ids"] = "text"
    chat_template: str = ""
    now: str = ""

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens in the files."""
        return token_dtype(self.largest_vocabulary)

    def key(self, unit: Unit) -> str:
        """Return a hash of everything that the unit's token files depend on."""
        settings = asdict(replace(self, skip_bad=False))
        text = json.dumps([_RECORD_FORMAT, settings, [(part.name, part.size) for part in unit.parts]])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class UnitRecord:
    """The result of a unit.

    Attributes:
        key: hash of the unit and its encoding.
        largest_token: -1 without tokens.
        bad_records: the first bad records, with file, row and fault.
        first_loss: place of the first text that the tokenizer cannot encode.
        contents: of the parts.
    """

    key: str
    counts: PrepareCounts = field(default_factory=PrepareCounts)
    largest_token: int = -1
    files: list[TokenFile] = field(default_factory=list)
    bad_records: list[str] = field(default_factory=list)
    first_loss: str = ""
    contents: list[Content] = field(default_factory=list)

    def add_bad_records(self, named: Sequence[str]) -> None:
        """Add bad records, of which the first are named."""
        self.counts.bad_records += len(named)
        self.bad_records += named[: _MOST_BAD_RECORDS - len(self.bad_records)]


class WorkFolder:
    """A hidden folder in which a dataset is made; its `files` are renamed to the dataset's folder."""

    def __init__(self, root: Path, dataset: str) -> None:
        self.root = root
        self.dataset = root / dataset
        self.path = root / f".{dataset}.preparing"
        self.files = self.path / "files"
        self.plan = self.path / "plan.json"

    def remove(self) -> None:
        """Delete the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)

    def clear(self, unit: Unit) -> None:
        """Delete the files that an interrupted call left of a unit."""
        self.files.mkdir(parents=True, exist_ok=True)
        for leftover in [*self.files.glob(f"*part_{unit.number:06d}_*"), self._record(unit)]:
            leftover.unlink(missing_ok=True)

    def read_record(self, unit: Unit, encoding: Encoding) -> UnitRecord | None:
        """Return the record of a unit; None if it is not done, has another key, or files are missing."""
        content = read_object(self._record(unit))
        if content.get("key") != encoding.key(unit):
            return None
        files = [TokenFile(**entry) for entry in content["files"]]
        if any(_size(self.files / file.name) != file.bytes for file in files):
            return None
        record = UnitRecord(**content | {"files": files, "counts": PrepareCounts(**content["counts"])})
        return None if record.bad_records and not encoding.skip_bad else record

    def write_record(self, unit: Unit, record: UnitRecord) -> None:
        """Write the done file of a unit."""
        write_atomic(self._record(unit), json.dumps(asdict(record)))

    def _record(self, unit: Unit) -> Path:
        return self.path / f"unit_{unit.number:06d}.json"


@dataclass(kw_only=True)
class PrepareSummary(PrepareCounts):
    """A prepared dataset with its counts, as recorded in prepare.json.

    Attributes:
        folder: sub-folder of the root (data_path of training), which holds the tokenizer.
        settings: everything except the tokenizer that the content depends on.
        tokenizer: hash of the tokenizer; None if the input was token ids of an unknown tokenizer.
        vocab_size: upper bound of ids.
        bad_record_names: the first records that cannot be read.
        first_loss: place of the first text that the tokenizer cannot encode.
        input_content: digest of the records of the input.
    """

    folder: Path
    settings: dict[str, Any]
    files: tuple[TokenFile, ...]
    tokenizer: str | None
    vocab_size: int
    end_of_text: int | None
    bad_record_names: Sequence[str]
    first_loss: str
    input_content: str

    @property
    def token_bytes(self) -> int:
        """Size of the token files."""
        return sum(file.bytes for file in self.files)


def manifest(
    settings: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, dtype: str, records: Sequence[UnitRecord]
) -> str:
    """Return the content of prepare.json; `tokenizer` is None for token ids of an unknown tokenizer."""
    counts = sum((record.counts for record in records), PrepareCounts())
    contents = [content for record in records for content in record.contents]
    content = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "input_content": digest_of_records(record for _, record in contents),
        "tokenizer": {
            "sha256": tokenizer and tokenizer.sha256,
            "vocab_size": vocab_size,
            "end_of_text": tokenizer and tokenizer.end_of_text,
            "begin_of_text": tokenizer and tokenizer.begin_of_text,
        },
        "column": COLUMN,
        "dtype": dtype,
        **{name: count for name, count in asdict(counts).items() if name != "input_bytes"},
        "bad_record_names": [name for record in records for name in record.bad_records][:_MOST_BAD_RECORDS],
        "first_loss": next((record.first_loss for record in records if record.first_loss), ""),
        "files": [asdict(file) for record in records for file in record.files],
    }
    # A name that is not UTF-8 is escaped.
    return json.dumps(content, indent=2, ensure_ascii=False).encode("utf-8", "backslashreplace").decode() + "\n"


def read_summary(folder: Location) -> PrepareSummary:
    """Read a dataset's prepare.json.

    Raises:
        DataError: the file is damaged or of another format.
        FileNotFoundError, NotADirectoryError: there is no such file.
    """
    file = folder / MANIFEST_FILE
    try:
        content = read_json(file)
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"it has format {content['format_version']}, this version reads format {FORMAT_VERSION}")
        files = tuple(TokenFile(**entry) for entry in content["files"])
        tokenizer = dict(content["tokenizer"])
        values = {**content, **tokenizer, "tokenizer": tokenizer["sha256"], "files": files}
        values |= {"folder": Path(str(folder)), "settings": dict(content["settings"]), "input_bytes": 0}
        summary = PrepareSummary(**{item.name: values[item.name] for item in fields(PrepareSummary)})
        counts = [getattr(summary, item.name) for item in fields(PrepareCounts)]
        numbers = [*counts, summary.vocab_size, *(file.bytes for file in files)]
        if {*map(type, numbers)} != {int} or not all(isinstance(token_file.name, str) for token_file in files):
            raise ValueError("a value has a wrong type")
        return summary
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"it cannot be read ({type(error).__name__}: {error})"
        raise DataError(f"{problem}. {remedy_for(folder)}", path=file) from error


def read_finished(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> PrepareSummary | None:
    """Read a finished dataset with the same settings; None if the folder is missing or empty.

    Raises:
        DataError: the folder holds something else, has other settings, or files that changed in name or size.
    """
    try:
        summary = read_summary(folder)
    except (FileNotFoundError, NotADirectoryError):
        is_empty = is_folder(folder) and not entries_of(folder)
        if is_empty or not (exists(folder) or folder.is_symlink()):
            return None
        problem = f"it exists and was not made by `pretrain prepare` (it has no {MANIFEST_FILE})"
        raise DataError(f"{problem}. Choose another --dataset or --output_path", path=folder) from None
    made, wanted = dict(summary.settings), dict(settings)
    if summary.tokenizer is not None:
        made["tokenizer"] = summary.tokenizer
        wanted["tokenizer"] = None if tokenizer is None else tokenizer.sha256
    differences = [
        f"  {name}: it has {made.get(name)}, requested is {value}"
        for name, value in wanted.items()
        if made.get(name) != value
    ]
    if differences:
        problem = "it was prepared from other text or with other settings:"
        raise DataError("\n".join([problem, *differences, remedy_for(folder)]), path=folder)
    for file in summary.files:
        if _size(folder / file.name) != file.bytes:
            raise DataError(
                f"it is missing, or does not have the {file.bytes:,} bytes that were written. {remedy_for(folder)}",
                path=folder / file.name,
            )
    return summary


def _size(path: Path) -> int | None:
    return path.stat().st_size if exists(path) else None


# The content of the input


def read_content(part: Part) -> Content:
    """Return the content of a part; raise a DataError if it cannot be read."""
    try:
        return _time_of(part), combine(*(content_record(*raw_range) for raw_range in part.raw))
    except OSError as error:
        raise DataError(f"it cannot be read: {reason_of(error)}", path=error.filename or part.name) from error


def contents_now(parts: Sequence[Part], noted: Sequence[Content]) -> list[Content]:
    """Return the content of each part. A part with the noted time of change has the noted content, and is not read."""
    times = [_time_of(part) for part in parts]
    stale = [part for part, time, (noted_time, _) in zip(parts, times, noted, strict=True) if time != noted_time]
    read = map_in_order(read_content, stale, usable_cores())
    return [content if content[0] == time else next(read) for content, time in zip(noted, times, strict=True)]


def changed_parts(parts: Sequence[Part], noted: Sequence[Content]) -> list[Part]:
    """Return the parts whose content is not the noted one."""
    pairs = zip(parts, noted, contents_now(parts, noted), strict=True)
    return [part for part, (_, before), (_, now) in pairs if before != now]


def times_of(parts: Sequence[Part]) -> str:
    """Return a digest of the times of change of all parts."""
    return digest_of_records(map(_time_of, parts))


def inputs_document(contents: Sequence[Content]) -> str:
    """Return the content of .inputs.json."""
    return json.dumps({"contents": contents})


def check_input(folder: Path, digest: str, parts: Sequence[Part]) -> None:
    """Raise a DataError if the input is not the one that a dataset was prepared from.

    Args:
        folder: of the dataset.
        digest: of the records, from prepare.json.
    """
    noted = _read_note(folder, digest, len(parts))
    now = contents_now(parts, noted)
    if digest_of_records(record for _, record in now) != digest:
        pairs = zip(parts, noted, now, strict=True)
        changed = sorted({part.source_name for part, (_, before), (_, after) in pairs if before != after})
        problem = f"it was prepared from other text (changed in content: {list_some(changed, 12)})"
        raise DataError(f"{problem}. {remedy_for(folder)}", path=folder)
    if now != noted:
        with suppress(OSError):  # then the next call reads these parts again
            write_atomic(folder / INPUTS_FILE, inputs_document(now))


def remedy_for(folder: Location) -> str:
    """Return what to do if a dataset was made from another input."""
    return f"Choose another --dataset or --output_path, or delete {folder} to prepare it again"


def _read_note(folder: Path, digest: str, count: int) -> list[Content]:
    """Return the noted content of each part; of none if the file is lost, damaged or of another dataset."""
    with suppress(OSError, KeyError, TypeError, ValueError, OverflowError):
        contents = [(int(time), int(record)) for time, record in read_object(folder / INPUTS_FILE)["contents"]]
        if len(contents) == count and digest_of_records(record for _, record in contents) == digest:
            return contents
    return [(-1, -1)] * count


def _time_of(part: Part) -> int:
    return combine(*(time_of_change(path.stat()) for path, _, _ in part.raw))
