"""Warnings about input files that hold the same text: `a.jsonl` beside `a.jsonl.gz`, or copies under other names."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from pretraining.data.storage.content import combine, content_record, open_ranges
from pretraining.text import count_of
from pretraining.tools.commands import COMPRESSED_ENDINGS
from pretraining.tools.prepare.formats import FORMATS
from pretraining.tools.prepare.packed_files import InputFile

log = logging.getLogger(__name__)

_ENDINGS = (".txt", ".text", *(ending for row in FORMATS if row.has_fields for ending in row.endings))
_PLACES, _PLACE_BYTES = 16, 1 << 12
"""Places of a file that are compared, spread evenly: all of a small one."""


def warn_of_copies(files: Sequence[InputFile]) -> None:
    """Warn of the first files with one text: of one name before known endings in a folder, or of equal content.

    Only files of equal size are read, and only in a few places.
    """
    names = _groups(files, _plain_path)
    _warn(names, "the same name before their endings")
    named = {file for group in names for file in group[1:]}
    candidates = _groups((file for file in files if file.size and file not in named), lambda file: file.size)
    for places in (1, _PLACES):  # the beginnings tell most files apart
        candidates = [alike for group in candidates for alike in _groups(group, partial(_content, places=places))]
    _warn(candidates, "the same size and content")


def _groups(files: Iterable[InputFile], key: Callable[[InputFile], Hashable]) -> list[list[InputFile]]:
    """Return the groups of several files with an equal key, in the order of the files."""
    groups = defaultdict(list)
    for file in files:
        groups[key(file)].append(file)
    return [group for group in groups.values() if len(group) > 1]


def _plain_path(file: InputFile) -> str:
    """Return the path of a file without the endings of compressions, and of formats of records or plain text."""
    path = str(file.path)
    for endings in (COMPRESSED_ENDINGS, _ENDINGS):
        if path.lower().endswith(endings):
            path = path[: -max(len(ending) for ending in endings if path.lower().endswith(ending))]
    return path


def _content(file: InputFile, places: int) -> Hashable:
    """Return the record of some places of a file, or the file itself if it cannot be read."""
    begins = {max(file.size - _PLACE_BYTES, 0) * number // (_PLACES - 1) for number in range(places)}
    with suppress(OSError), open_ranges(file.path) as read:
        records = (content_record(read, begin, min(begin + _PLACE_BYTES, file.size)) for begin in sorted(begins))
        return combine(*records)
    return file


def _warn(groups: list[list[InputFile]], alike: str) -> None:
    if groups:
        copies = count_of(sum(len(group) - 1 for group in groups), "file")
        first, second = (file.path for file in groups[0][:2])
        log.warning("%s probably read twice, the first is %s: %s has %s. Leave one out.", copies, second, first, alike)
