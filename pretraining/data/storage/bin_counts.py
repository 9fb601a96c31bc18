"""The bin counts of a packed dataset: bins per block, counted once and stored with the index.

    index, S, packing --pack_block--> bins before each block, for both splits --atomic write--> mapped

The name of the file identifies index, S and packing. The file has the counts, then their CRC-32. A damaged file is
rebuilt.
"""

from __future__ import annotations

import logging
import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from pretraining.config.training import DataConfig, Packing
from pretraining.data.sampling.packing import ALGORITHM_VERSION, pack_block
from pretraining.data.storage.dataset_files import DatasetFiles, index_folders
from pretraining.data.storage.index import BLOCK_DOCUMENTS, SPLITS, Index
from pretraining.data.storage.index_folder import write_once

log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8


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
        file.write(content + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"))
        return _name(index, config)

    what = f"the counts of dataset '{name}'"
    path = write_once(index_folders(files, config), what, write, lambda path: bool(_open(path, config)))
    made = _open(path, config)
    assert made is not None, "written, but unreadable"
    return made


def find_bin_counts(files: DatasetFiles, index: Index, config: DataConfig) -> BinCounts | None:
    """Open the valid bin counts of a dataset, next to a possible place of its index; None if there are none."""
    paths = (folder / _name(index, config) for folder in index_folders(files, config))
    return next(filter(None, (_open(path, config) for path in paths)), None)


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
    return f"{index.path.stem}-{config.packing}{ALGORITHM_VERSION}-{config.seq_length}.bins"


def _open(path: Path, config: DataConfig) -> BinCounts | None:
    """Map the counts in a file; None if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        counts, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if zlib.crc32(counts) == int.from_bytes(checksum, "little"):
            bounds = np.frombuffer(counts, dtype="<i8").reshape(len(SPLITS), -1)
            return BinCounts(config.packing, config.seq_length, dict(zip(SPLITS, bounds, strict=True)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        pass
    log.warning("%s is damaged: it is not used", path)
    return None
