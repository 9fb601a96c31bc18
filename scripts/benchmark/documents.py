"""Random documents for the benchmarks of loaders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

VOCABULARY = 32_000
SEQ_LENGTH = 4096
FILES = 4
BATCH_DOCUMENTS = 8192


def use_one_core() -> None:
    """Bind the process and its threads to one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def write_documents(folder: Path, mean_tokens: int, tokens: int, vocabulary: int = VOCABULARY) -> None:
    """Write a dataset of random tokens, unless it exists: `FILES` Arrow files with a row per document.

    Lengths are log-normal with sigma 1: the median is 0.61 of the mean, and one document in sixteen is longer than
    2.8 times the mean.

    Args:
        mean_tokens: mean length of a document.
        tokens: approximate total.
        vocabulary: upper bound of token ids, at most 65,536.
    """
    if folder.exists():
        return
    temporary = folder.with_name(f".{folder.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(mean_tokens)
    schema = pa.schema([("tokens", pa.list_(pa.uint16()))])
    for file in range(FILES):
        with pa.ipc.new_file(str(temporary / f"{file}.arrow"), schema) as writer:
            for first in range(0, tokens // FILES // mean_tokens, BATCH_DOCUMENTS):
                count = min(BATCH_DOCUMENTS, tokens // FILES // mean_tokens - first)
                lengths = generator.lognormal(np.log(mean_tokens) - 0.5, 1.0, count).astype(np.int32)
                offsets = np.concatenate(([0], np.cumsum(np.maximum(lengths, 1)))).astype(np.int32)
                ids = generator.integers(0, vocabulary, offsets[-1], dtype=np.uint16)
                column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
                writer.write_batch(pa.record_batch([column], schema=schema))
    temporary.rename(folder)


def token_files(folder: Path) -> list[Path]:
    """Return the files of a dataset, in order."""
    return sorted(folder.glob("*.arrow"))


def read_documents(files: Iterable[Path]) -> Iterator[np.ndarray]:
    """Yield the documents of files in order, as uint16 arrays."""
    for path in files:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                column = reader.get_batch(number)["tokens"]
                yield from np.split(column.values.to_numpy(), column.offsets.to_numpy()[1:-1])
