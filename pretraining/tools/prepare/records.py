"""What is written about a dataset beside its tokens: prepare.json, and the records of a call that is under way.

    <output_path>/<dataset>/prepare.json       what the folder holds and what it was made from
    <output_path>/.<dataset>.preparing/        the work folder
      tokenizer.json, tokenizer_config.json    that encodes; none where the input holds token ids
      plan.json                                what that was trained on, if it was
      units/unit_000003.json                   a record: the complete token files of a unit, and what was read for them
      files/part_000003_000000.arrow           the first token file of unit 3
      files/prepare.json                       written last; then `files` is renamed to the dataset's folder

A record names a token file only once that is complete and on disk: a call that was stopped at any moment goes on behind
the files of its records. prepare.json does not say when, where and how fast the dataset was made, so the same input
gives the same file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretraining.data.storage.dataset_files import MANIFEST_FILE
from pretraining.data.tokenizer import TOKENIZER_FILE, Tokenizer
from pretraining.errors import DataError
from pretraining.files import entries_of, exists, is_folder, read_json, write_atomic
from pretraining.tools.prepare.encoders import Encoder
from pretraining.tools.prepare.token_files import COLUMN, Counts, TokenFile, TokenRows
from pretraining.tools.prepare.units import Unit

FORMAT_VERSION = 1
"""Of prepare.json."""
_RECORD_FORMAT = 1
_NUMBERS = ("documents", "empty_documents", "tokens", "characters", "text_bytes")


@dataclass(frozen=True)
class PrepareSummary:
    """A prepared dataset, as its prepare.json has it.

    Attributes:
        folder: in the root that training takes as data_path; the root has the tokenizer.
        empty_documents: those without any text; they are in no file.
        characters, text_bytes: of the text, the bytes in UTF-8; 0 where the input was token ids.
        median_document_tokens: about, within 3 per cent; None where an older release made it.
        tokenizer: its hash; None where token ids came without one.
        vocab_size: every id is below it.
    """

    folder: Path
    documents: int
    empty_documents: int
    tokens: int
    characters: int
    text_bytes: int
    median_document_tokens: int | None
    files: int
    token_bytes: int
    tokenizer: str | None
    vocab_size: int
    end_of_text: int | None


@dataclass(frozen=True)
class Encoding:
    """What the tokens of a unit depend on, besides its input.

    Attributes:
        tokenizer: its hash; None where ids are taken as they are, without one.
        encoder: None where ids are taken as they are. What one has made is not taken for the other's.
        largest_vocabulary: every id is below it.
    """

    text_field: str
    tokens_per_file: int
    dtype: str
    tokenizer: str | None
    encoder: Encoder | None
    largest_vocabulary: int

    def key(self, unit: Unit) -> str:
        """A hash of all that decides what the unit's token files hold."""
        parts = [(part.name, part.size) for part in unit.parts]
        text = json.dumps([_RECORD_FORMAT, asdict(self), parts])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class UnitRecord:
    """How far a unit is.

    Attributes:
        key: of the unit and its encoding.
        files: complete token files; `counts` goes up to the end of the last of them.
        lengths: number of documents by their tokens, a length rounded down to its five leading bits.
        largest_token: -1 where no token is written.
    """

    key: str
    files: list[TokenFile] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    lengths: dict[int, int] = field(default_factory=dict)
    largest_token: int = -1
    finished: bool = False

    def count(self, documents: TokenRows) -> None:
        """Counts documents that are written, and empty ones, which are not."""
        self.counts += documents.counts()
        lengths = documents.lengths[documents.lengths > 0]
        if not len(lengths):
            return
        self.largest_token = max(self.largest_token, int(documents.tokens.max()))
        low_bits = np.maximum(np.frexp(lengths)[1] - 5, 0)  # the exponent is the number of bits
        for rounded, count in zip(*np.unique(lengths >> low_bits << low_bits, return_counts=True), strict=True):
            self.lengths[int(rounded)] = self.lengths.get(int(rounded), 0) + int(count)


class WorkFolder:
    """The hidden folder in which a dataset is made; its `files` become the dataset's folder."""

    def __init__(self, root: Path, dataset: str) -> None:
        self.root = root
        self.dataset = root / dataset
        self.path = root / f".{dataset}.preparing"
        self.files = self.path / "files"
        self._units = self.path / "units"
        self.plan = self.path / "plan.json"

    def create(self) -> None:
        """Makes the folder if it is not there, and clears away what was half written."""
        for folder in (self.files, self._units):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*.tmp"):
                leftover.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read_record(self, unit: Unit, encoding: Encoding) -> UnitRecord:
        """How far a unit is; an empty record where nothing was made of it, or of other input, or files are gone."""
        key = encoding.key(unit)
        content = read_object(self._record(unit))
        if content.get("key") != key:
            return UnitRecord(key)
        files = [TokenFile(**entry) for entry in content["files"]]
        if any(_size(self.files / file.name) != file.bytes for file in files):
            return UnitRecord(key)
        lengths = {int(length): count for length, count in content["lengths"].items()}  # JSON has no integer keys
        return UnitRecord(**content | {"files": files, "counts": Counts(**content["counts"]), "lengths": lengths})

    def write_record(self, unit: Unit, record: UnitRecord) -> None:
        """Says how far a unit is."""
        write_atomic(self._record(unit), json.dumps(asdict(record)))

    def _record(self, unit: Unit) -> Path:
        return self._units / f"unit_{unit.number:06d}.json"


def write_manifest(
    folder: Path,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    dtype: str,
    records: Sequence[UnitRecord],
) -> None:
    """Writes prepare.json.

    Args:
        settings: what the content depends on besides the tokenizer; an equal call has equal ones.
        tokenizer: None where the input was token ids of an unknown one.
    """
    counts = counts_of(records)
    content = {
        "format_version": FORMAT_VERSION,
        "settings": dict(settings),
        "tokenizer": {
            "sha256": None if tokenizer is None else tokenizer.sha256,
            "vocab_size": vocab_size,
            "end_of_text": None if tokenizer is None else tokenizer.end_of_text,
        },
        "column": COLUMN,
        "dtype": dtype,
        "documents": counts.documents,
        "empty_documents": counts.empty_documents,
        "tokens": counts.tokens,
        "median_document_tokens": median_length(records),
        "characters": counts.characters,
        "text_bytes": counts.text_bytes,
        "files": [asdict(file) for record in records for file in record.files],
    }
    write_atomic(folder / MANIFEST_FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def counts_of(records: Sequence[UnitRecord]) -> Counts:
    """What was read and written for some units."""
    return sum((record.counts for record in records), Counts())


def median_length(records: Sequence[UnitRecord]) -> int:
    """The median number of tokens a document, within 3 per cent: the middle of the range that it lies in."""
    lengths = sum((Counter(record.lengths) for record in records), Counter[int]())
    left = lengths.total()
    for length in sorted(lengths):
        left -= 2 * lengths[length]
        if left <= 0:
            break
    return length + (1 << max(length.bit_length() - 5, 0)) // 2


def read_summary(folder: Path) -> PrepareSummary:
    """What a dataset's prepare.json says; a FileNotFoundError or NotADirectoryError where there is none."""
    return _read(folder)[0]


def read_summaries(root: Path) -> list[PrepareSummary]:
    """All datasets in a root that have a prepare.json, by name."""
    folders = sorted(path.parent for path in root.glob(f"*/{MANIFEST_FILE}"))
    return [read_summary(folder) for folder in folders if not folder.name.startswith(".")]


def read_finished(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer | None) -> PrepareSummary | None:
    """The summary of a finished dataset made with the same settings; None where the folder is not there, or empty.

    Reads names and sizes only.

    Raises:
        DataError: the folder holds something else, was made with other settings, or has changed since.
    """
    try:
        summary, made, token_files = _read(folder)
    except (FileNotFoundError, NotADirectoryError):
        is_empty = is_folder(folder) and not entries_of(folder)
        if is_empty or not (exists(folder) or folder.is_symlink()):
            return None
        raise DataError(
            f"{folder} is there already and was not made by `pretrain prepare` (it has no {MANIFEST_FILE}). "
            "It is left as it is: choose another --dataset or --output_path"
        ) from None
    wanted = dict(settings)
    if summary.tokenizer is not None:
        if not exists(folder.parent / TOKENIZER_FILE) or tokenizer is None:
            raise DataError(
                f"{folder.parent / TOKENIZER_FILE}, with which {folder} was encoded, is gone. Put it back, or delete "
                f"{folder} to prepare it again"
            )
        wanted["tokenizer"], made["tokenizer"] = tokenizer.sha256, summary.tokenizer
    if differences := describe_differences(made, wanted):
        problem = f"{folder} was prepared from other text or with other settings:"
        raise DataError("\n".join([problem, *differences, _way_out(folder)]))
    _check_sizes(folder, token_files)
    return summary


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is not the same."""
    return [
        f"  {name}: it has {there.get(name)}, asked for is {value}"
        for name, value in here.items()
        if there.get(name) != value
    ]


def _check_sizes(folder: Path, token_files: Sequence[TokenFile]) -> None:
    for token_file in token_files:
        path = folder / token_file.name
        size = _size(path)
        if size != token_file.bytes:
            now = "is gone" if size is None else f"has {size:,} bytes"
            raise DataError(
                f"{path} {now}, {token_file.bytes:,} bytes were written. Delete {folder} and prepare it again"
            )


def _size(path: Path) -> int | None:
    return path.stat().st_size if exists(path) else None


def _read(folder: Path) -> tuple[PrepareSummary, dict[str, Any], list[TokenFile]]:
    """Summary, settings and files that prepare.json names.

    Raises:
        DataError: it cannot be read.
    """
    file = folder / MANIFEST_FILE
    try:
        content = read_json(file)
        if content["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{file} has format {content['format_version']}, this version reads format {FORMAT_VERSION}. "
                f"{_way_out(folder)}"
            )
        token_files = [TokenFile(**entry) for entry in content["files"]]
        summary = PrepareSummary(
            folder=folder,
            files=len(token_files),
            token_bytes=sum(token_file.bytes for token_file in token_files),
            tokenizer=content["tokenizer"]["sha256"],
            vocab_size=content["tokenizer"]["vocab_size"],
            end_of_text=content["tokenizer"]["end_of_text"],
            median_document_tokens=content.get("median_document_tokens"),
            **{name: content[name] for name in _NUMBERS},
        )
        numbers = [content[name] for name in _NUMBERS] + [summary.vocab_size, summary.median_document_tokens or 0]
        numbers += [token_file.bytes for token_file in token_files]
        if {*map(type, numbers)} != {int} or not all(isinstance(token_file.name, str) for token_file in token_files):
            raise ValueError("a value is of another type")
        return summary, dict(content["settings"]), token_files
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} cannot be read ({type(error).__name__}: {error}). {_way_out(folder)}") from error


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that was written here; empty where it is missing, or a failing disk has spoilt it."""
    try:
        content = read_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _way_out(folder: Path) -> str:
    return f"Choose another --dataset or --output_path, or delete {folder} to prepare it again"
