"""Doubts about token files that read well: a start names them in warnings, and trains.

    names of files     -> files of other splits (train, validation, test) in one training set
    tokens of a sample -> a type of another width; documents that run together

Leaving such files out would change the order of runs that have begun with them.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.index import BLOCK_DOCUMENTS, Index
from pretraining.data.storage.token_format import contiguous_bytes, width_problem
from pretraining.text import list_some

log = logging.getLogger(__name__)

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "eval", "evaluation", "dev", "heldout"),
    "test": ("test", "testing"),
    "cache": ("cache",),
}
"""Words in names of files and folders, by the split that they mean; `datasets` leaves files named cache-*."""
_SPLIT_OF_WORD = {word: split for split, words in _SPLITS.items() for word in words}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLIT_OF_WORD, reverse=True))})(?![a-z])", re.IGNORECASE)
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
_SAMPLED_DOCUMENTS = 32


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
        if not any(map(_WORD.search, distinct)):
            continue
        splits = {path: _split_of(path) for path, _ in paths}
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


def _split_of(path: str) -> str | None:
    """Return the split that a path seems to belong to, by its last part with such a word; None without any."""
    for part in reversed(path.split("/")):
        found = _WORD.search(part)
        if found is not None:
            return _SPLIT_OF_WORD[found[1].lower()]
    return None


def warn_about_tokens(files: DatasetFiles, index: Index, config: DataConfig) -> None:
    """Log a warning if the tokens of a dataset's first file seem to have another type, or its documents no borders."""
    first = int(np.flatnonzero(np.diff(index.first_documents))[0]) if len(index.documents) else None
    if first is None:
        return
    begin, end = index.first_documents[first : first + 2].tolist()
    documents = index.documents[begin : min(end, begin + BLOCK_DOCUMENTS)]
    offsets, lengths = documents["offset"].astype(np.int64), documents["tokens"].astype(np.int64)
    width = int(index.token_bytes[first])
    kind = np.dtype(f"<{'i' if index.is_signed[first] else 'u'}{width}")
    path = Path(files.path(first))
    try:
        with path.open("rb") as file:
            begin_byte, end_byte = contiguous_bytes(offsets, lengths, width)
            sample = os.pread(file.fileno(), end_byte - begin_byte, begin_byte)
            problem = width_problem(np.frombuffer(sample[: len(sample) // width * width], dtype=kind))
            runs_together = _marks_nothing(config) and _has_no_borders(file.fileno(), offsets, lengths, kind)
    except OSError:  # training names the file when it reads it
        return
    if problem is not None:
        log.warning("%s: %s", path, problem)
    if runs_together:
        log.warning(
            "dataset '%s': no token marks the borders of documents, so they run together. Give --sep_token=<id of "
            "an end of text>, or --document_mask=true",
            files.name,
        )


def _marks_nothing(config: DataConfig) -> bool:
    return config.sep_token is None and config.bos_token is None and not config.document_mask


def _has_no_borders(descriptor: int, offsets: np.ndarray, lengths: np.ndarray, kind: np.dtype[np.integer]) -> bool:
    """Return whether neither the first nor the last token is the same in all of some documents."""
    filled = np.flatnonzero(lengths)[:_SAMPLED_DOCUMENTS]
    if len(filled) < 2:
        return False
    ends = offsets[filled] + (lengths[filled] - 1) * kind.itemsize
    return all(
        len({os.pread(descriptor, kind.itemsize, int(place)) for place in places}) > 1
        for places in (offsets[filled], ends)
    )
