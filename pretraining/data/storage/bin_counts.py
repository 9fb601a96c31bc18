"""The bin counts of a packed dataset: bins per block, counted once in parallel and stored beside the index.

    index, S, packing --count_bins, in processes--> bins before each block, for both splits --atomic write--> mapped

The file has a line of JSON, which identifies index, S and packing, and then the counts. A damaged file, or a file of
another index, is rebuilt.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from pretraining.config.training import DataConfig, Packing
from pretraining.data.sampling.packing import ALGORITHM_VERSION, pack_block
from pretraining.data.storage.dataset_files import DatasetFiles, index_folders
from pretraining.data.storage.index import SPLITS, Index
from pretraining.data.storage.index_files import write_once
from pretraining.data.threads import map_in_order
from pretraining.errors import DataError
from pretraining.files import check_regular, exists, parse_json
from pretraining.launch.machine import usable_cores

log = logging.getLogger(__name__)

BLOCKS_PER_PROCESS = 1024
"""Blocks per counting process: starting a process takes about as long as counting them."""


@dataclass(frozen=True)
class BinCounts:
    """Bin counts of a dataset. `bounds` has, per split, the bins before each block, then all, [blocks + 1] int64."""

    packing: Packing
    seq_length: int
    bounds: dict[str, np.ndarray]

    def bins(self, split: str) -> int:
        """Count the bins of a split."""
        return int(self.bounds[split][-1])


def build_bin_counts(files: DatasetFiles, index: Index, config: DataConfig, workers: int | None = None) -> BinCounts:
    """Return the bin counts of a dataset; count first if they are missing, in at most `workers` processes.

    Raises:
        DataError: a counting process fails, or the counts cannot be written.
    """
    found = find_bin_counts(files, index, config)
    if found is not None:
        return found
    damaged = next((path for path in _paths(files, index, config) if exists(path)), None)
    if damaged is not None:
        log.warning("%s is damaged, or belongs to another index: rebuilding it", damaged)
    name, seq_length, packing = files.name, config.seq_length, config.packing
    documents, header = f"{len(index.documents):,}", _header(index, config)
    log.info("packing dataset '%s': %s documents into samples of %d tokens, %s", name, documents, seq_length, packing)

    def write(file: IO[bytes]) -> str:
        counts = _count_in_processes(name, index, seq_length, packing, workers)
        bounds = np.zeros((len(SPLITS), counts.shape[1] + 1), dtype="<i8")
        np.cumsum(counts, axis=1, out=bounds[:, 1:])
        content = bounds.tobytes()
        line = json.dumps({**header, "crc32": zlib.crc32(content)}).encode()
        file.write(line + b" " * (-(len(line) + 1) % 8) + b"\n" + content)  # aligns the numbers
        return _name(index, config)

    what = f"the counts of dataset '{name}'"
    write_once(index_folders(files, config), what, write, lambda path: _open(path, header) is not None)
    made = find_bin_counts(files, index, config)
    assert made is not None, "written, but unreadable"
    return made


def find_bin_counts(files: DatasetFiles, index: Index, config: DataConfig) -> BinCounts | None:
    """Open the valid bin counts of a dataset; None without any."""
    header = _header(index, config)
    for path in _paths(files, index, config):
        bounds = _open(path, header)
        if bounds is not None:
            return BinCounts(config.packing, config.seq_length, dict(zip(SPLITS, bounds, strict=True)))
    return None


def count_bins(index: Index, seq_length: int, packing: Packing, begin: int, end: int) -> np.ndarray:
    """Count the bins of blocks [begin, end) in each split, [splits, end - begin] int64."""
    counts = np.zeros((len(SPLITS), end - begin), dtype="<i8")
    for row, name in zip(counts, SPLITS, strict=True):
        split = index.split(name)
        size = split.block_documents
        for block in (np.flatnonzero(np.diff(split.block_bounds[begin : end + 1])) + begin).tolist():
            lengths = split.lengths(block * size, (block + 1) * size)
            row[block - begin] = len(pack_block(lengths, seq_length, packing))
    return counts


def _count_in_processes(name: str, index: Index, seq_length: int, packing: Packing, workers: int | None) -> np.ndarray:
    """Return `count_bins` of all blocks; count large datasets in several processes."""
    # `multiprocessing` would run the caller's main module again.
    blocks = len(index.split(SPLITS[0]).block_bounds) - 1
    processes = min(workers or usable_cores(), blocks // BLOCKS_PER_PROCESS)
    if processes < 2:
        return count_bins(index, seq_length, packing, 0, blocks)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def count(bounds: tuple[int, int]) -> np.ndarray:
        begin, end = bounds
        task = [str(index.path), str(seq_length), packing, str(begin), str(end)]
        command = [sys.executable, "-m", "pretraining.data.storage.bin_counts", *task]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        if done.returncode or len(done.stdout) != len(SPLITS) * (end - begin) * 8:
            raise DataError(
                f"packing dataset '{name}': the process for blocks {begin} to {end - 1} exited with status "
                f"{done.returncode}; its output is above"
            )
        return np.frombuffer(done.stdout, dtype="<i8").reshape(len(SPLITS), end - begin)

    ranges = pairwise(blocks * number // processes for number in range(processes + 1))
    return np.concatenate(list(map_in_order(count, ranges, processes)), axis=1)


def _paths(files: DatasetFiles, index: Index, config: DataConfig) -> list[Path]:
    """Return possible paths of the counts, beside the possible paths of the index."""
    return [folder / _name(index, config) for folder in index_folders(files, config)]


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


def _open(path: Path, header: dict[str, Any]) -> np.ndarray | None:
    """Map the counts in a file, [splits, blocks + 1]; None if they are missing, damaged or have another header."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = content.find(b"\n") + 1
        recorded = parse_json(content[:begin])
        if "documents" in recorded:  # a checksum of documents, which earlier versions wrote in place of the index's
            recorded["index"] = header["index"]
            del recorded["documents"]
        if recorded != {**header, "crc32": zlib.crc32(memoryview(content)[begin:])}:
            return None
        return np.frombuffer(content, dtype="<i8", offset=begin).reshape(len(SPLITS), -1)
    except (OSError, ValueError, TypeError):
        return None


if __name__ == "__main__":
    path, length, kind, first, last = sys.argv[1:]
    counted = count_bins(Index(Path(path)), int(length), cast(Packing, kind), int(first), int(last))
    sys.stdout.buffer.write(counted.tobytes())
