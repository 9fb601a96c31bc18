"""The documents of token files in an object store, found without reading the tokens of each.

    prepare:  finished file --`write_record`--> .<name>.documents in its folder: places, lengths, first and last tokens
    index:    that record, if it fits the object  -->  DocumentLayout      some ranges of the object are read
              without one, the whole object       -->  `local_copy`        a file on a local disk, for any format

A record is hidden, so listings and digests do not include it. It fits an object of its size whose content
record is the recorded one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from threading import BoundedSemaphore
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from pretraining.data.storage.content import content_record
from pretraining.data.storage.token_format import DocumentLayout
from pretraining.errors import DataError
from pretraining.files import Location, parse_json, reason_of, write_atomic
from pretraining.object_store import StorePath
from pretraining.text import format_bytes

if TYPE_CHECKING:
    from pretraining.data.storage.dataset_files import DatasetFiles

COPIES_AT_ONCE = 4
"""Local copies of a process at once; their disk holds as many of the largest objects."""
_LARGEST_RATIO = 32
"""Largest size of a record, in bytes per byte of its file; a larger one is not read."""
_copies = BoundedSemaphore(COPIES_AT_ONCE)


def record_name(path: str) -> str:
    """Return the name of the record of a file."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.documents"


class EndTokens:
    """The first and last tokens of an object's documents by position, as the array of a `DocumentLayout`.

    Args:
        positions: [n] int64, ascending.
        tokens: [n] tokens at these positions.
    """

    def __init__(self, positions: np.ndarray, tokens: np.ndarray) -> None:
        self.dtype = tokens.dtype
        self._positions, self._tokens = positions, tokens

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens at some of the positions, [n]."""
        tokens: np.ndarray = self._tokens[np.searchsorted(self._positions, positions)]
        return tokens


def write_record(path: Path, layout: DocumentLayout, read_as: str) -> None:
    """Write the record of a finished token file.

    Args:
        read_as: settings that the layout depends on (`index_folder.read_as`).
    """
    size = path.stat().st_size
    record = content_record(path, 0, size, layout)
    ends, filled = layout.offsets + layout.lengths * layout.width, layout.lengths > 0
    firsts = layout.tokens[layout.offsets[filled] // layout.width]
    lasts = layout.tokens[ends[filled] // layout.width - 1]
    # Documents mostly follow each other, so that the gaps before them are zeros.
    gaps = layout.offsets - np.concatenate(([0], ends[:-1]))
    header = {"read_as": read_as, "bytes": size, "content": record, "tokens": firsts.dtype.str}
    header |= {"documents": len(gaps), "filled": len(firsts)}
    parts = (gaps.astype("<i8"), layout.lengths.astype("<u4"), firsts, lasts)
    content = json.dumps(header).encode() + b"\n" + zlib.compress(b"".join(part.tobytes() for part in parts))
    write_atomic(path.with_name(record_name(path.name)), content)


def read_record(
    place: Location, size: int, read_as: str, strip_tokens: Sequence[int]
) -> tuple[DocumentLayout, int] | None:
    """Return the documents of an object by its record, and the record of its content; None unless the record fits it.

    Args:
        size: of the object.
        strip_tokens: if a document begins or ends with one, the result is None: the stripped end is not recorded.
    """
    try:
        line, _, packed = (place.parent / record_name(place.name)).open("rb").read().partition(b"\n")
        header = parse_json(line)
        count, filled, kind = header["documents"], header["filled"], np.dtype(header["tokens"])
        length = 12 * count + 2 * filled * kind.itemsize
        if (header["read_as"], header["bytes"]) != (read_as, size) or not 0 <= length <= _LARGEST_RATIO * size + 2**16:
            return None
        raw = zlib.decompressobj().decompress(packed, length + 1)
        gaps, lengths = np.frombuffer(raw, "<i8", count), np.frombuffer(raw, "<u4", count, 8 * count)
        firsts, lasts = np.frombuffer(raw, kind, offset=12 * count).reshape(2, filled)
        if np.isin((firsts, lasts), strip_tokens).any():
            return None
        layout = _layout(size, gaps, lengths.astype(np.int64), firsts, lasts)
        record = content_record(place, 0, size, layout)
        return (layout, record) if record == header["content"] else None
    except (OSError, ValueError, KeyError, IndexError, TypeError, zlib.error):
        return None


def _layout(size: int, gaps: np.ndarray, lengths: np.ndarray, firsts: np.ndarray, lasts: np.ndarray) -> DocumentLayout:
    """Return the layout in a record; raise a ValueError if it is impossible."""
    width, filled = firsts.dtype.itemsize, np.flatnonzero(lengths)
    offsets = np.cumsum(gaps.astype(np.int64) + lengths * width) - lengths * width
    begins, sizes = offsets[filled], lengths[filled] * width
    is_inside = (begins >= 0) & (begins % width == 0) & (begins + sizes <= size)
    if firsts.dtype.kind not in "iu" or len(firsts) != len(filled) or not is_inside.all():
        raise ValueError("documents outside the file")
    positions = np.concatenate((begins // width, (begins + sizes) // width - 1))
    order = np.argsort(positions, kind="stable")
    tokens: Any = EndTokens(positions[order], np.concatenate((firsts, lasts))[order])
    return DocumentLayout(offsets, lengths, width, tokens)


@contextmanager
def local_copy(files: DatasetFiles, number: int, folder: str | None = None) -> Iterator[str]:
    """Provide the path of a token file on a disk: its own, or that of a copy of an object, which is removed at the end.

    The folder of the copy also has the other file of a Megatron pair. Errors about the copy name the object.

    Args:
        folder: for copies; None = that of the system for temporary files.

    Raises:
        DataError: the disk has no room, or the object has changed since it was listed.
    """
    if not files.is_remote:
        yield files.path(number)
        return
    stem, partners = files.paths[number].rpartition(".")[0], list[int]()
    if f"{stem}.idx" in files.paths:
        partners = [other for other, path in enumerate(files.paths) if path.rpartition(".")[0] == stem]
    root = Path(folder or gettempdir())
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _copies, TemporaryDirectory(prefix="pretrain-", dir=root, ignore_cleanup_errors=True) as copies:
            for part in {number, *partners}:
                # The tokens of a pair are not read with its index, so that a file of their size is enough.
                _copy(files, part, Path(copies), is_empty=part != number and not files.paths[part].endswith(".idx"))
            try:
                yield f"{copies}/{files.paths[number]}"
            except DataError as error:
                error.args = (str(error).replace(copies, files.folder),)
                raise
    except OSError as error:
        size = format_bytes(files.sizes[number])
        raise DataError(
            f"its copy of {size} in {root} cannot be written: {reason_of(error)}. Make room there, or give "
            "--data_cache_path=<a folder with room>",
            path=files.path(number),
        ) from error


def _copy(files: DatasetFiles, number: int, folder: Path, *, is_empty: bool) -> None:
    place, target = files.place(number), folder / files.paths[number]
    assert isinstance(place, StorePath)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        file.truncate(files.sizes[number])
        if not is_empty:
            place.ask(lambda store: _write(file, store.read_pieces(place.key)))
    check_version(files, number)


def _write(file: IO[bytes], pieces: Iterable[bytes]) -> None:
    file.seek(0)  # another try begins again
    file.writelines(pieces)


def check_version(files: DatasetFiles, number: int) -> None:
    """Raise a DataError if an object is not the listed version."""
    place = files.place(number)
    if isinstance(place, StorePath) and place.tag() != files.times[number]:
        raise DataError("changed while it was read: start again", path=place)
