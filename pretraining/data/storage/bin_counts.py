"""The bin counts of a packed dataset: bins per block, counted once and stored with the index.

    index, S, packing --pack_block--> bins before each block, for both splits --atomic write--> mapped

The file has a line of JSON, which identifies index, S and packing, and then the counts. A damaged file, or a file of
another index, is rebuilt.
"""

from __future__ import annotations

import json
import logging
import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from pretraining.config.training import DataConfig, Packing
from pretraining.data.sampling.packing import ALGORITHM_VERSION, pack_block
from pretraining.data.storage.dataset_files import DatasetFiles, index_folders
from pretraining.data.storage.index import BLOCK_DOCUMENTS, SPLITS, Index
from pretraining.data.storage.index_folder import write_once
from pretraining.files import parse_json

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BinCounts:
    """Bin counts of a dataset. `bounds` has, per split, the bins before each block, then all, [blocks + 1] int64."""

    packing: Packing
    seq_length: int
    bounds: dict[str, np.ndarray]

    def bins(self, split: str) -> int:
        """Count the bins of a split."""
        return int(self.bounds[split][-1])


def build_bin_counts(files: DatasetFiles, index: Index, config: DataConfig) -> BinCounts:
    """Return the bin counts of a dataset; count first if they are missing.

    Raises:
        DataError: the counts cannot be written.
    """
    counts = find_bin_counts(files, index, config)
    if counts is not None:
        return counts
    name, seq_length, packing = files.name, config.seq_length, config.packing
    documents = f"{len(index.documents):,}"
    log.info("packing dataset '%s': %s documents into samples of %d tokens, %s", name, documents, seq_length, packing)

    def write(file: IO[bytes]) -> str:
        content = _count_bins(index, seq_length, packing).tobytes()
        line = json.dumps({**_header(index, config), "crc32": zlib.crc32(content)}).encode()
        file.write(line + b" " * (-(len(line) + 1) % 8) + b"\n" + content)  # aligns the numbers
        return _name(index, config)

    what = f"the counts of dataset '{name}'"
    path = write_once(index_folders(files, config), what, write, lambda path: bool(_open(path, index, config)))
    made = _open(path, index, config)
    assert made is not None, "written, but unreadable"
    return made


def find_bin_counts(files: DatasetFiles, index: Index, config: DataConfig) -> BinCounts | None:
    """Open the valid bin counts of a dataset, next to a possible place of its index; None if there are none."""
    paths = (folder / _name(index, config) for folder in index_folders(files, config))
    return next(filter(None, (_open(path, index, config) for path in paths)), None)


def _count_bins(index: Index, seq_length: int, packing: Packing) -> np.ndarray:
    """Return the bins before each block, then all, [splits, blocks + 1] int64; a block takes about a millisecond."""
    size = BLOCK_DOCUMENTS
    splits = [index.split(name) for name in SPLITS]
    bounds = np.zeros((len(splits), len(splits[0].block_bounds)), dtype="<i8")
    for row, split in zip(bounds, splits, strict=True):
        for block in np.flatnonzero(np.diff(split.block_bounds)).tolist():
            row[block + 1] = len(pack_block(split.lengths(block * size, (block + 1) * size), seq_length, packing))
    return np.cumsum(bounds, axis=1)


def _name(index: Index, config: DataConfig) -> str:
    return f"{index.path.stem}-{config.packing}-{config.seq_length}.bins"


def _header(index: Index, config: DataConfig) -> dict[str, Any]:
    """Return the values that identify index, sequence length and packing."""
    return {
        "algorithm": ALGORITHM_VERSION,
        "settings": index.header["settings"],
        "files": index.header["files"],
        "index": index.checksum,
        "seq_length": config.seq_length,
        "packing": config.packing,
    }


def _open(path: Path, index: Index, config: DataConfig) -> BinCounts | None:
    """Map the counts in a file; None if it is missing, damaged or of another index."""
    header = _header(index, config)
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = content.find(b"\n") + 1
        recorded = parse_json(content[:begin])
        if recorded == {**header, "crc32": zlib.crc32(memoryview(content)[begin:])}:
            bounds = np.frombuffer(content, dtype="<i8", offset=begin).reshape(len(SPLITS), -1)
            return BinCounts(config.packing, config.seq_length, dict(zip(SPLITS, bounds, strict=True)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError):
        pass
    log.warning("%s is damaged, or belongs to another index: it is not used", path)
    return None
