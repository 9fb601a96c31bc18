"""Doubts about token files that read well: a start names them in warnings, and trains.

    names of files     -> files of other splits (train, validation, test) in one training set
    tokens of a sample -> a type of another width; documents that run together
    columns of Arrow   -> masks of tokens: padding, or texts that other tools do not learn from

Leaving such files out would change the order of runs that have begun with them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pretraining.config.training import DataConfig
from pretraining.data.storage.arrow import MAGIC, STREAM_MAGIC
from pretraining.data.storage.content import open_ranges
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import BLOCK_DOCUMENTS, Index
from pretraining.data.storage.token_format import beginning_of, contiguous_bytes, read_bytes, width_problem
from pretraining.errors import DataError
from pretraining.files import Location
from pretraining.object_store import StorePath
from pretraining.text import list_some

log = logging.getLogger(__name__)

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "heldout"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders, by the split that they mean; the `datasets` library looks for most of them."""
_CACHE = re.compile(r"(?<![a-z])cache(?![a-z])[^/]*$")  # the `datasets` library leaves cache-*.arrow
_SPLIT_OF_WORD = {word: split for split, words in _SPLITS.items() for word in words}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLIT_OF_WORD, reverse=True))})(?![a-z])", re.IGNORECASE)
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
MASKS = {
    **dict.fromkeys(("attention_mask", "loss_mask", "assistant_masks", "completion_mask"), 0),
    "labels": -100,
}
"""Names of columns, and the value that masks a token."""
ROWS_AT_ONCE = 1000
_MOST_PADDINGS = 2
_SAMPLED_DOCUMENTS = 32
_SAMPLED_FILES = 16


def warn_about_splits(listing: Sequence[DatasetFiles], config: DataConfig) -> None:
    """Log a warning if files of a training set look like different splits.

    Datasets that the user has named are looked at one by one, since their own names are no surprise.
    """
    named = [[(path, path) for path in files.paths] for files in listing]
    if not config.datasets:
        named = [[(f"{files.name}/{path}", path) for files in listing for path in files.paths]]
    for paths in named:
        # Without their digits most names are equal, so 100,000 files take milliseconds.
        distinct = set("\n".join(path for path, _ in paths).translate(_WITHOUT_DIGITS).split("\n"))
        if not any(_WORD.search(path) or _CACHE.search(path) for path in distinct):
            continue
        splits = {path: "cache" if _CACHE.search(path) else split_of(path) for path, _ in paths}
        counts = Counter(splits.values())
        others = sorted(path for path, split in splits.items() if split not in (None, "train"))
        if others and len(counts) > 1:
            log.warning(
                "%s of %s files look like another split: %s. They are trained on like all others. To leave them out, "
                "move them to another folder, or name the rest with --datasets",
                f"{len(others):,}",
                f"{len(splits):,}",
                list_some(others, 3),
            )


def split_of(path: str) -> str | None:
    """Return the split that a path seems to belong to, by its last part with such a word; None without any."""
    for part in reversed(path.split("/")):
        found = _WORD.search(part)
        if found is not None:
            return _SPLIT_OF_WORD[found[1].lower()]
    return None


def warn_about_tokens(files: DatasetFiles, index: Index, config: DataConfig) -> None:
    """Log a warning if tokens seem to have another type, or a column masks some, or documents have no borders.

    The beginnings of a few files of a dataset are read.
    """
    filled = np.flatnonzero(np.diff(index.first_documents))
    if not len(filled):
        return
    looked_at = filled[np.unique(np.linspace(0, len(filled) - 1, _SAMPLED_FILES, dtype=np.int64))].tolist()
    samples = [_Beginning(files, index, number) for number in looked_at]
    try:
        problems = [(each.path, problem) for each in samples if (problem := each.width_problem()) is not None]
        marks_nothing = config.sep is None and config.bos is None and not config.document_mask
        runs_together = marks_nothing and samples[0].has_no_borders()
    except OSError:  # training names the file when it reads it
        return
    column, stripped = config.col_name, config.strip_tokens
    masks = ((each.path, describe_masks(islice(rows_of(each.place), 1), column, stripped)) for each in samples)
    masked = next((each for each in masks if each[1] is not None), None)
    if masked is not None:
        log.warning("%s: %s", *masked)
    if problems:
        others = f" ({len(problems)} of {len(samples)} files that were looked at)" if len(samples) > 1 else ""
        log.warning("%s: %s%s", *problems[0], others)
    if runs_together:
        log.warning(
            "dataset '%s': no token marks the borders of documents, so they run together. Give --sep_token=<id of the "
            "end of a text>, or --document_mask=true",
            files.name,
        )


class _Beginning:
    """The first documents of a token file, as the index has them."""

    def __init__(self, files: DatasetFiles, index: Index, number: int) -> None:
        self.path, self.place = files.path(number), files.place(number)
        begin, end = index.first_documents[number : number + 2].tolist()
        documents = index.documents[begin : min(end, begin + BLOCK_DOCUMENTS)]
        self._offsets, self._lengths = documents["offset"].astype(np.int64), documents["tokens"].astype(np.int64)
        self._type = np.dtype(f"<{'i' if index.is_signed[number] else 'u'}{index.token_bytes[number]}")

    def width_problem(self) -> str | None:
        """Return how its tokens seem to have another type, or None; raise an OSError if it is unreadable."""
        width = self._type.itemsize
        begin, end = contiguous_bytes(self._offsets, self._lengths, width)
        with open_ranges(self.place) as read:
            content = read(begin, end - begin)
        return width_problem(np.frombuffer(content[: len(content) // width * width], dtype=self._type))

    def has_no_borders(self) -> bool:
        """Return whether its documents neither begin nor end with one common token."""
        filled = np.flatnonzero(self._lengths)[:_SAMPLED_DOCUMENTS]
        if len(filled) < 2:
            return False
        width, firsts = self._type.itemsize, self._offsets[filled]
        lasts = firsts + (self._lengths[filled] - 1) * width
        with open_ranges(self.place) as read:
            return all(len({read(place, width) for place in places.tolist()}) > 1 for places in (firsts, lasts))


# Columns that mask tokens


def rows_of(path: Location) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file or stream with masks, at most `ROWS_AT_ONCE` at a time; none of another file."""
    content = path.open_ranges()[0] if isinstance(path, StorePath) else pa.py_buffer(read_bytes(str(path)))
    beginning = beginning_of(path, len(MAGIC))
    is_file = beginning == MAGIC
    if not is_file and not beginning.startswith(STREAM_MAGIC):
        return
    table = pa.ipc.open_file(content) if is_file else pa.ipc.open_stream(content)
    if not MASKS.keys() & {*table.schema.names}:
        return
    for batch in map(table.get_batch, range(table.num_record_batches)) if is_file else table:
        yield from (batch.slice(begin, ROWS_AT_ONCE) for begin in range(0, len(batch), ROWS_AT_ONCE))


def describe_masks(batches: Iterable[pa.RecordBatch], column: str, strip_tokens: Collection[int] = ()) -> str | None:
    """Return how another column masks tokens of a column, and the way on; None if none masks any that training reads.

    Args:
        strip_tokens: tokens that training removes at both ends of a row.
    """
    masked: Counter[str] = Counter()
    tokens, total = defaultdict[str, set[int]](set), 0
    damage = (pa.ArrowException, DataError, OSError, ValueError, MemoryError, SystemError)
    with suppress(*damage):  # which the reader of the tokens names
        for batch in batches:
            ids = _values(batch, column)
            total += 0 if ids is None else len(ids)
            for name, value in MASKS.items():
                mask = _values(batch, name)
                if name != column and ids is not None and mask is not None and len(mask) == len(ids):
                    masked[name] += int((mask == value).sum())
                    tokens[name] |= {*np.unique(ids[mask == value])[: _MOST_PADDINGS + 1].tolist()}
    name, count = max(masked.items(), key=lambda each: each[1], default=("", 0))
    if not count or tokens[name] <= {*strip_tokens}:
        return None
    remedy = "no setting reads such a column: leave these tokens out where the rows are made"
    if len(tokens[name]) <= _MOST_PADDINGS:
        padding = ",".join(map(str, sorted(tokens[name])))
        remedy = f"train with --strip_tokens={padding}, which removes padding at both ends of a document"
    return (
        f"its column {name!r} masks {count / total:.1%} of the tokens that were looked at, but training learns from "
        f"all tokens: {remedy}"
    )


def _values(batch: pa.RecordBatch, name: str) -> np.ndarray | None:
    """Return the numbers in a column of lists; None if it holds something else."""
    column = batch.column(name) if batch.schema.names.count(name) == 1 else None
    if column is None or not pa.types.is_nested(column.type):
        return None
    column.validate(full=True)  # pyarrow may end the process on damaged lists
    values = column.flatten()
    if isinstance(values, pa.Array) and (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        return np.asarray(pc.fill_null(pc.cast(values, pa.int64(), safe=False), 0).to_numpy(False))
    return None
