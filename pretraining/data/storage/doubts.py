"""Doubts about token files that read well: a start names them in warnings, and trains.

    names of files     -> files of other splits (train, validation, test) in one training set
    first documents    -> a type of another width; documents that run together
    columns of Arrow   -> masks of tokens: padding, or texts that other tools do not learn from

Leaving such files out would change the order of runs that have begun with them.
"""

from __future__ import annotations

import logging
import re
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
from pretraining.data.storage.token_format import beginning_of, contiguous_bytes, width_problem
from pretraining.files import Location
from pretraining.object_store import StorePath
from pretraining.text import list_some

log = logging.getLogger(__name__)

_SPLITS = {
    "train": "train training",
    "validation": "validation valid val dev heldout",
    "test": "test testing eval evaluation",
}
"""Words in names of files and folders, by the split that they mean; the `datasets` library looks for most of them."""
_SPLIT_OF_WORD = {word: split for split, words in _SPLITS.items() for word in words.split()}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLIT_OF_WORD, reverse=True))})(?![a-z])", re.IGNORECASE)
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
MASKS = dict.fromkeys(("attention_mask", "loss_mask", "assistant_masks", "completion_mask"), 0) | {"labels": -100}
"""Names of columns, and the value that masks a token."""
ROWS_AT_ONCE = 1000
_SAMPLED_FILES = 16


def warn_about_splits(listing: Sequence[DatasetFiles], config: DataConfig) -> None:
    """Log a warning if files of a training set look like different splits.

    Datasets that the user has named are looked at one by one, since their own names are no surprise.
    """
    sets = [[f"{files.name}/{path}" for files in listing for path in files.paths]]
    for paths in [files.paths for files in listing] if config.datasets else sets:
        # Without their digits most names are equal, so 100,000 files take milliseconds.
        distinct = {*"\n".join(paths).translate(_WITHOUT_DIGITS).split("\n")}
        splits = {path: split_of(path) for path in paths} if any(map(_WORD.search, distinct)) else {}
        others = sorted(path for path, split in splits.items() if split not in (None, "train"))
        if others and len({*splits.values()}) > 1:
            log.warning(
                "%s of %s files look like another split: %s. They are trained on like all others. To leave them out, "
                "move them to another folder, or name the rest with --datasets",
                *(f"{len(others):,}", f"{len(splits):,}", list_some(others, 3)),
            )


def split_of(path: str) -> str | None:
    """Return the split that a path seems to belong to, by its last part with such a word; None if no part has one."""
    found = (_WORD.search(part) for part in reversed(path.split("/")))
    return next((_SPLIT_OF_WORD[word[1].lower()] for word in found if word is not None), None)


def warn_about_tokens(files: DatasetFiles, index: Index, config: DataConfig) -> None:
    """Log a warning about the first of a few files whose tokens seem to mean something else than what is read."""
    filled = np.flatnonzero(np.diff(index.first_documents))
    places = np.linspace(0, len(filled) - 1, _SAMPLED_FILES, dtype=np.int64) if len(filled) else filled
    for number in np.unique(filled[places]).tolist():
        with suppress(OSError):  # training names the file when it reads it
            masks = describe_masks(islice(rows_of(files.place(number)), 1), config.col_name, config.strip_tokens)
            if problem := masks or _token_problem(files, index, number, config):
                log.warning("%s: %s", files.path(number), problem)
                return


def _token_problem(files: DatasetFiles, index: Index, number: int, config: DataConfig) -> str | None:
    """Return how the first tokens of a file seem to have another type, or no borders of documents."""
    begin, end = index.first_documents[number : number + 2].tolist()
    documents = index.documents[begin : min(end, begin + BLOCK_DOCUMENTS)]
    dtype = np.dtype(f"<{'i' if index.is_signed[number] else 'u'}{index.token_bytes[number]}")
    offsets, lengths = documents["offset"].astype(np.int64), documents["tokens"].astype(np.int64)
    begin, end = contiguous_bytes(offsets, lengths, dtype.itemsize)
    with open_ranges(files.place(number)) as read:
        content = read(begin, end - begin)
    tokens = np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype)
    firsts = (offsets - begin) // dtype.itemsize
    whole = (lengths > 0) & (firsts >= 0) & (firsts + lengths <= len(tokens))
    ends = (tokens[firsts[whole]], tokens[(firsts + lengths)[whole] - 1])
    is_marked = config.sep is not None or config.bos is not None or config.document_mask
    if not is_marked and all(len(np.unique(each)) > 1 for each in ends):
        return (
            "no token marks the borders of documents, so they run together. Give --sep_token=<id of the end of a "
            "text>, or --document_mask=true"
        )
    return width_problem(tokens)


def rows_of(path: Location) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow file or stream, at most `ROWS_AT_ONCE` at a time; none of another file."""
    beginning = beginning_of(path, len(MAGIC))
    if beginning != MAGIC and not beginning.startswith(STREAM_MAGIC):
        return
    content = path.open_ranges()[0] if isinstance(path, StorePath) else pa.memory_map(str(path))
    table = pa.ipc.open_file(content) if beginning == MAGIC else pa.ipc.open_stream(content)
    for batch in map(table.get_batch, range(table.num_record_batches)) if beginning == MAGIC else table:
        yield from (batch.slice(begin, ROWS_AT_ONCE) for begin in range(0, len(batch), ROWS_AT_ONCE))


def describe_masks(batches: Iterable[pa.RecordBatch], column: str, strip_tokens: Collection[int] = ()) -> str | None:
    """Return how another column masks tokens of a column, and what to do; None if none does, or tokens are stripped."""
    damage = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError, SystemError)
    with suppress(*damage):  # the reader of the tokens names it
        for batch in () if strip_tokens else batches:
            for name in sorted({*batch.schema.names} & MASKS.keys() - {column}):
                mask = batch.column(name)
                mask.validate(full=True)  # pyarrow may end the process on damaged lists
                values = pc.cast(mask.flatten(), pa.int64()) if pa.types.is_nested(mask.type) else None
                if values is not None and (share := pc.mean(pc.equal(values, MASKS[name])).as_py()):
                    return (
                        f"its column {name!r} masks {share:.1%} of the tokens in some rows, but training learns from "
                        "all tokens. Give --strip_tokens=<id of the padding>, which removes padding at both ends of a "
                        "document, or leave these tokens out where the rows are made"
                    )
    return None
