"""What the benchmarks of data share: made-up documents, one core, and contenders that take turns in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch

from scripts.benchmark.common import announce_rest

VOCABULARY = 32_000
SEQ_LENGTH = 4096
FILES = 4
BATCH_DOCUMENTS = 8192
Key = TypeVar("Key", bound=Hashable)


def use_one_core() -> None:
    """Binds the process, with all its threads, to one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def write_documents(folder: Path, mean_tokens: int, tokens: int, vocabulary: int = VOCABULARY) -> None:
    """Writes a dataset of random tokens, unless it is there: `FILES` Arrow files, one row a document.

    Lengths are log-normal with sigma 1: the median is 0.61 of the mean, and one document in sixteen is longer than
    2.8 times the mean.

    Args:
        folder: of the dataset.
        mean_tokens: of a document.
        tokens: in all, about.
        vocabulary: token ids are below it; at most 65,536.
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
    """The files of a dataset."""
    return sorted(folder.glob("*.arrow"))


def read_documents(files: Iterable[Path]) -> Iterator[np.ndarray]:
    """The documents of files in order, uint16 each."""
    for path in files:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                column = reader.get_batch(number)["tokens"]
                yield from np.split(column.values.to_numpy(), column.offsets.to_numpy()[1:-1])


def take_turns(contenders: Mapping[Key, Callable[[], int]], rounds: int) -> dict[Key, list[float]]:
    """Lets contenders work in turns, and measures them; the first turn of each warms up and does not count.

    Args:
        contenders: each works for a turn when called, and returns how much it did.
        rounds: turns of each that count.

    Returns:
        What each did a second, turn by turn.
    """
    rates: dict[Key, list[float]] = {name: [] for name in contenders}
    warm_up_began = time.perf_counter()
    for number in range(rounds + 1):
        if number == 1:
            announce_rest(rounds * (time.perf_counter() - warm_up_began))
        for name, work in contenders.items():
            began = time.perf_counter()
            done = work()
            rates[name].append(done / (time.perf_counter() - began))
    return {name: rate[1:] for name, rate in rates.items()}
