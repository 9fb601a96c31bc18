"""The hidden folder in which a dataset is made, and what lets an interrupted call be gone on with.

    <output_path>/.<dataset>.preparing/
      tokenizer.json, tokenizer_config.json    that encodes; none where the input holds token ids
      plan.json                                what that was trained on, if it was
      units/unit_000003.json                   a record: the whole token files of a unit, and what was read for them
      files/part_000003_000000.arrow           the first token file of unit 3
      files/prepare.json                       written last; then `files` is renamed to the dataset's folder

Everything is written aside and renamed. A record names a token file only once that is whole and on disk, so that after
a stop at any moment the documents of a unit are those in the files of its record, and all that follow.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretraining.tools.prepare.encoding_progress import Counts
from pretraining.tools.prepare.units import Unit
from pretraining.tools.prepare.writer import TokenFile, write_aside

_FORMAT = 1


@dataclass(frozen=True)
class Encoding:
    """What the tokens of a unit depend on, besides its input.

    Attributes:
        text_field: column or field of the documents.
        tokens_per_file: a token file with so many is finished.
        dtype: of a token, `uint16` or `uint32`.
        tokenizer: hash of the tokenizer; None where ids are taken as they are, without one.
        largest_vocabulary: every id is below it.
        encodes_text: whether the input is text, and not token ids.
    """

    text_field: str
    tokens_per_file: int
    dtype: str
    tokenizer: str | None
    largest_vocabulary: int
    encodes_text: bool

    def key(self, unit: Unit) -> str:
        """A hash of all that decides what the unit's token files hold."""
        parts = [(part.name, part.size) for part in unit.parts]
        text = json.dumps([_FORMAT, asdict(self), parts])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class UnitRecord:
    """How far a unit is.

    Attributes:
        key: of the unit and its encoding.
        files: whole token files.
        counts: up to the end of the last of them.
        lengths: how many documents have how many tokens, that number with its five leading bits.
        largest_token: of all written; -1 where there are none.
        finished: whether that is everything.
    """

    key: str
    files: list[TokenFile] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    lengths: dict[int, int] = field(default_factory=dict)
    largest_token: int = -1
    finished: bool = False

    def count(self, length: int) -> None:
        """Take a document of so many tokens into `lengths`."""
        low_bits = max(length.bit_length() - 5, 0)
        rounded = length >> low_bits << low_bits
        self.lengths[rounded] = self.lengths.get(rounded, 0) + 1


class WorkFolder:
    """The paths of a work folder.

    Attributes:
        path: of the folder.
        files: the token files; becomes the dataset's folder.
    """

    def __init__(self, root: Path, dataset: str) -> None:
        self.root = root
        self.path = root / f".{dataset}.preparing"
        self.files = self.path / "files"
        self._units = self.path / "units"
        self._plan = self.path / "plan.json"

    def create(self) -> None:
        """Make the folder, if it is not there, and clear away what was half written."""
        for folder in (self.files, self._units):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.files.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with all that is in it; it was made here."""
        shutil.rmtree(self.path, ignore_errors=True)

    def read_plan(self) -> dict[str, Any]:
        """plan.json; empty where there is none that can be read."""
        return _read_object(self._plan)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write plan.json."""
        write_aside(self._plan, json.dumps(plan))

    def read_record(self, unit: Unit, key: str) -> UnitRecord:
        """How far a unit is; an empty record where nothing was made of it, or of other input, or files are gone."""
        content = _read_object(self._record(unit))
        if content.get("key") != key:
            return UnitRecord(key)
        files = [TokenFile(**entry) for entry in content["files"]]
        for file in files:
            path = self.files / file.name
            if not path.exists() or path.stat().st_size != file.bytes:
                return UnitRecord(key)
        lengths = {int(length): count for length, count in content["lengths"].items()}  # JSON has no integer keys
        return UnitRecord(
            key, files, Counts(**content["counts"]), lengths, content["largest_token"], content["finished"]
        )

    def write_record(self, unit: Unit, record: UnitRecord) -> None:
        """Say how far a unit is."""
        write_aside(self._record(unit), json.dumps(asdict(record)))

    def _record(self, unit: Unit) -> Path:
        return self._units / f"unit_{unit.number:06d}.json"


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object that was written here; empty where it is missing, or a failing disk has spoilt it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
