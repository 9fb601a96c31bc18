"""Doubts about token files that read well: a start names them in warnings, and trains.

    names of files     -> files of other splits (train, validation, test) in one training set
    tokens of a sample -> a type of another width; documents that run together
    columns of Arrow   -> masks of tokens, which training does not read

Leaving such files out would change the order of runs that have begun with them.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import BLOCK_DOCUMENTS, Index
from pretraining.data.storage.masks import describe_masks, rows_of
from pretraining.data.storage.token_format import contiguous_bytes, width_problem
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
    """Log a warning if tokens of a dataset seem to have another type, or its documents no borders.

    The beginnings of a few files are read.
    """
    _warn_about_masks(files, config)
    filled = np.flatnonzero(np.diff(index.first_documents))
    if not len(filled):
        return
    looked_at = filled[np.unique(np.linspace(0, len(filled) - 1, _SAMPLED_FILES, dtype=np.int64))].tolist()
    samples = [_Beginning(files, index, number) for number in looked_at]
    try:
        problems = [(each.path, problem) for each in samples if (problem := each.width_problem()) is not None]
        runs_together = _marks_nothing(config) and samples[0].has_no_borders()
    except OSError:  # training names the file when it reads it
        return
    if problems:
        others = f" ({len(problems)} of {len(samples)} files that were looked at)" if len(samples) > 1 else ""
        log.warning("%s: %s%s", *problems[0], others)
    if runs_together:
        log.warning(
            "dataset '%s': no token marks the borders of documents, so they run together. Give --sep_token=<id of the "
            "end of a text>, or --document_mask=true",
            files.name,
        )


def _warn_about_masks(files: DatasetFiles, config: DataConfig) -> None:
    """Log a warning if a column masks tokens in the first rows of a few files."""
    if files.file_type not in ("arrow", "arrow_stream"):
        return
    for number in np.unique(np.linspace(0, len(files.paths) - 1, _SAMPLED_FILES, dtype=np.int64)).tolist():
        found = describe_masks(islice(rows_of(files.path(number)), 1), config.col_name, config.strip_tokens)
        if found is not None:
            log.warning("%s: %s", files.path(number), found)
            return


class _Beginning:
    """The first documents of a token file, as the index has them."""

    def __init__(self, files: DatasetFiles, index: Index, number: int) -> None:
        self.path = Path(files.path(number))
        begin, end = index.first_documents[number : number + 2].tolist()
        documents = index.documents[begin : min(end, begin + BLOCK_DOCUMENTS)]
        self._offsets, self._lengths = documents["offset"].astype(np.int64), documents["tokens"].astype(np.int64)
        self._type = np.dtype(f"<{'i' if index.is_signed[number] else 'u'}{index.token_bytes[number]}")

    def width_problem(self) -> str | None:
        """Return how its tokens seem to have another type, or None; raise an OSError if it is unreadable."""
        width = self._type.itemsize
        begin, end = contiguous_bytes(self._offsets, self._lengths, width)
        with self.path.open("rb") as file:
            content = os.pread(file.fileno(), end - begin, begin)
        return width_problem(np.frombuffer(content[: len(content) // width * width], dtype=self._type))

    def has_no_borders(self) -> bool:
        """Return whether its documents neither begin nor end with one common token."""
        filled = np.flatnonzero(self._lengths)[:_SAMPLED_DOCUMENTS]
        if len(filled) < 2:
            return False
        width, firsts = self._type.itemsize, self._offsets[filled]
        lasts = firsts + (self._lengths[filled] - 1) * width
        with self.path.open("rb") as file:
            return all(
                len({os.pread(file.fileno(), width, place) for place in places.tolist()}) > 1
                for places in (firsts, lasts)
            )


def _marks_nothing(config: DataConfig) -> bool:
    return config.sep is None and config.bos is None and not config.document_mask
