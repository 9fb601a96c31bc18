"""Small token files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pretraining.config.batch_sizes import BatchSizes
from pretraining.config.training import DataConfig
from pretraining.data.batch import StepBatch
from pretraining.data.dataset import build_indices, build_loader, open_datasets
from pretraining.data.loader import Loader
from pretraining.data.samples import OpenedDatasets
from pretraining.data.storage.dataset_files import list_datasets


def write_documents(
    path: Path,
    documents: Sequence[Sequence[int] | None],
    kind: pa.DataType | None = None,
    batch_documents: int = 10**9,
    column: str = "tokens",
) -> None:
    """Write an Arrow file of one column with `batch_documents` rows per record batch, or one if `kind` is no list."""
    kind = kind or pa.list_(pa.uint16())
    is_list = not pa.types.is_integer(kind)
    size = batch_documents if is_list else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(column, kind)])
    with pa.ipc.new_file(str(path), schema) as writer:
        for begin in range(0, len(documents), size):
            rows = [None if row is None else list(row) for row in documents[begin : begin + size]]
            writer.write_batch(pa.record_batch([pa.array(rows if is_list else rows[0], type=kind)], schema=schema))


def random_documents(count: int, seed: int = 0, largest: int = 40, vocab_size: int = 1000) -> list[list[int]]:
    """Documents of 0 to `largest` tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, generator.integers(0, largest + 1)).tolist() for _ in range(count)]


def make_root(root: Path, seed: int = 0, **datasets: int) -> Path:
    """A data_path with one dataset per keyword, which gives its number of documents; two files each."""
    for number, (name, count) in enumerate(datasets.items()):
        documents = random_documents(count, seed + number)
        write_documents(root / name / "one.arrow", documents[: count // 3], batch_documents=7)
        write_documents(root / name / "two.arrow", documents[count // 3 :])
    return root


def opened(config: DataConfig) -> OpenedDatasets:
    listing = list_datasets(config)
    build_indices(listing, config)
    return open_datasets(listing, config)


def plan(global_batch: int, ranks: int = 1, accumulation: int = 1) -> BatchSizes:
    share = -(-global_batch // ranks)
    return BatchSizes(global_batch, -(-share // accumulation), accumulation, ranks)


def loader(
    config: DataConfig, batch: BatchSizes | None = None, rank: int = 0, seed: int = 7, vocab_size: int = 1000
) -> Loader:
    datasets = None if config.use_dummy_dataset else opened(config)
    return build_loader(datasets, config, batch or plan(8), rank, seed, vocab_size)


def rows(batch: StepBatch) -> list[list[int]]:
    """All sequences of a batch that are not padding."""
    found: list[list[int]] = []
    for micro_batch in batch.micro_batches:
        lengths = micro_batch.lengths_B
        filled = len(micro_batch.tokens_BT) if lengths is None else int((lengths > 0).sum())
        found += micro_batch.tokens_BT[:filled].tolist()
    return found
