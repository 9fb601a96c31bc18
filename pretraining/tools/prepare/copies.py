"""Warnings about input files that hold the same text: `a.jsonl` beside `a.jsonl.gz`, or copies under other names."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress

from pretraining.data.storage.content import checksum_of_parts, open_ranges
from pretraining.text import count_of
from pretraining.tools.commands import COMPRESSED_ENDINGS
from pretraining.tools.prepare.formats import FORMATS
from pretraining.tools.prepare.packed_files import InputFile

log = logging.getLogger(__name__)

_ENDINGS = (".txt", ".text", *(ending for row in FORMATS if row.has_fields for ending in row.endings))


def warn_of_copies(files: Sequence[InputFile]) -> None:
    """Warn of the first files with one text: of one name before known endings in a folder, or of equal content.

    Only files of equal size are read, and only parts of them.
    """
    names = _groups(files, _plain_path)
    _warn(names, "the same name before their endings")
    named = {file for group in names for file in group[1:]}
    sizes = _groups((file for file in files if file.size and file not in named), lambda file: file.size)
    _warn([alike for group in sizes for alike in _groups(group, _content)], "the same size and content")


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


def _content(file: InputFile) -> Hashable:
    """Return the checksum of parts of a file, or the file itself if it cannot be read."""
    with suppress(OSError), open_ranges(file.path) as read:
        return checksum_of_parts(read, file.size)
    return file


def _warn(groups: list[list[InputFile]], alike: str) -> None:
    if groups:
        copies = count_of(sum(len(group) - 1 for group in groups), "file")
        first, second = (file.path for file in groups[0][:2])
        log.warning("%s probably read twice, the first is %s: %s has %s. Leave one out.", copies, second, first, alike)
