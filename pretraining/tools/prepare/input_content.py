"""Whether an input is still the one that a dataset was prepared from: a record of the content of each part.

    part --read_content, just before it is encoded--> done file of its unit --> .inputs.json beside prepare.json

The file prepare.json has a digest of all records, and .inputs.json the records, and the times of change that were seen
with them: a part with another time is read again. A dataset of an earlier version has neither, and is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pretraining.data.storage.content import combine, content_record, digest_of_records, open_ranges, time_of_change
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import read_object, reason_of, write_atomic
from pretraining.launch.machine import usable_cores
from pretraining.text import list_some
from pretraining.tools.prepare.units import Part

INPUTS_FILE = ".inputs.json"
"""Records of the input of a dataset, in its folder."""
Content = tuple[int, int]
"""Digest of the times of change of a part's files, and record of their content."""


def read_content(part: Part) -> Content:
    """Return the content of a part; raise a DataError if it cannot be read."""
    try:
        time, records = _time_of(part), []
        for path, begin, end in part.raw:
            with open_ranges(path) as read:
                records.append(content_record(read, begin, end))
    except OSError as error:
        raise DataError(f"it cannot be read: {reason_of(error)}", path=error.filename or part.name) from error
    return time, combine(*records)


def changed_parts(parts: Sequence[Part], contents: Sequence[Content]) -> list[Part]:
    """Return the parts whose content is not the recorded one. Unchanged times cost no read."""
    pairs = [(part, record) for part, (time, record) in zip(parts, contents, strict=True) if time != _time_of(part)]
    now = map_in_order(read_content, [part for part, _ in pairs], usable_cores())
    return [part for (part, record), (_, found) in zip(pairs, now, strict=True) if found != record]


def times_of(parts: Sequence[Part]) -> str:
    """Return a digest of the times of change of all parts."""
    return digest_of_records(map(_time_of, parts))


def inputs_document(contents: Sequence[Content]) -> str:
    """Return the content of .inputs.json."""
    return json.dumps({"contents": contents})


def check_input(folder: Path, digest: str | None, parts: Sequence[Part]) -> None:
    """Raise a DataError if the input is not the one that a dataset was prepared from.

    Args:
        folder: of the dataset.
        digest: of the records, from prepare.json; None in an earlier version.
    """
    if digest is None:
        return
    times, noted = [_time_of(part) for part in parts], _read_note(folder, digest)
    if times == [time for time, _ in noted] or len(noted) not in (0, len(parts)):  # cut by another version
        return
    noted = noted or [(-1, -1)] * len(parts)
    stale = [number for number, (time, _) in enumerate(noted) if time != times[number]]
    read = map_in_order(lambda number: read_content(parts[number]), stale, usable_cores())
    found = dict(zip(stale, read, strict=True))
    now = [found.get(number, content) for number, content in enumerate(noted)]
    if digest_of_records(record for _, record in now) != digest:
        changed = {parts[number].source_name for number, content in found.items() if noted[number][1] != content[1]}
        named = f"changed in content: {list_some(sorted(changed), 12)}"
        raise DataError(f"it was prepared from other text ({named}). {remedy_for(folder)}", path=folder)
    with suppress(OSError):  # then the next call reads these parts again
        write_atomic(folder / INPUTS_FILE, inputs_document(now))


def remedy_for(folder: Path) -> str:
    """Return the way on if a dataset was made from something else."""
    return f"Choose another --dataset or --output_path, or delete {folder} to prepare it again"


def _read_note(folder: Path, digest: str) -> list[Content]:
    """Return the recorded content of each part; empty if the file is lost, damaged or of another dataset."""
    try:
        contents = [(int(time), int(record)) for time, record in read_object(folder / INPUTS_FILE)["contents"]]
        return contents if digest_of_records(record for _, record in contents) == digest else []
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return []


def _time_of(part: Part) -> int:
    return combine(*(time_of_change(path.stat()) for path, _, _ in part.raw))
