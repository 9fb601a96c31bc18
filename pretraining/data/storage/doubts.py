"""Doubts about token files that read well: a start names them in warnings, and trains.

    names of files     -> files of other splits (train, validation, test) in one training set
    first documents    -> a type of another width; documents that run together

Leaving such files out would change the order of runs that have begun with them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.content import open_ranges
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import BLOCK_DOCUMENTS, Index
from pretraining.data.storage.token_format import contiguous_bytes, width_problem
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
    words = (_WORD.search(part) for part in reversed(path.split("/")))
    return next((_SPLIT_OF_WORD[word[1].lower()] for word in words if word is not None), None)


def warn_about_tokens(files: DatasetFiles, index: Index, config: DataConfig) -> None:
    """Log a warning about the first of a few files whose tokens seem to mean something else than what is read."""
    filled = np.flatnonzero(np.diff(index.first_documents))
    places = np.linspace(0, len(filled) - 1, _SAMPLED_FILES, dtype=np.int64) if len(filled) else filled
    for number in np.unique(filled[places]).tolist():
        with suppress(OSError):  # training names the file when it reads it
            if problem := _token_problem(files, index, number, config):
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
    if not is_marked and all(len(np.unique(tokens_at_ends)) > 1 for tokens_at_ends in ends):
        return (
            "no token marks the borders of documents, so they run together. Give --sep_token=<id of the end of a "
            "text>, or --document_mask=true"
        )
    return width_problem(tokens)
