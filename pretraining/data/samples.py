"""The samples of a dataset: an endless sequence in which each sample is a pure function of its number k.

    k --SampleOrder--> (shard, j) --TokenStream or PackedStream--> spans of documents --DocumentReader--> tokens

Each stage handles many samples per call, because Python's cost per call is high.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.sampling.packing import BinCache, PackedStream, bin_cache, cut_blocks
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import OrderCache, Spans, TokenStream, cut_shards, order_cache, shard_count
from pretraining.data.storage.bin_counts import BinCounts
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.document_reader import DocumentReader, Fetch, OpenFiles
from pretraining.data.storage.index import Index
from pretraining.data.storage.open_files import open_files
from pretraining.data.storage.store_files import ChunkCache

SplitName = Literal["train", "held_out"]


@dataclass(frozen=True)
class Samples:
    """An endless sequence of samples, each a pure function of its number.

    Attributes:
        name: name of the dataset.
        shards: number of logical shards.
        fingerprint: JSON values that identify the samples. `content` is the record of the files' content (content.py).
        samples: (begin, end) -> shards of samples [begin, end), and their numbers within these shards, both
            [end - begin] int64.
        spans: (shards, numbers), both [rows] -> pieces of documents for each row. A dummy sample is one document.
        read: (spans, target, rows) writes samples into these rows of `target`, [batch rows, S + 1], padded with zeros.
            It raises a DataError if a file is unreadable or has a token outside the vocabulary.
        pass_samples: number of samples of the first pass.
        changes: how the files differ from the files of the previous index; empty if unknown.
        fetches: spans -> what makes the parts of them in an object store ready; None for data on a disk.
    """

    name: str
    shards: int
    fingerprint: dict[str, Any]
    samples: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    spans: Callable[[np.ndarray, np.ndarray], Spans]
    read: Callable[[Spans, np.ndarray, np.ndarray], None]
    pass_samples: int = 1 << 40  # of endless data
    changes: str = ""
    fetches: Callable[[Spans], Iterable[Fetch]] | None = None


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset with its index and, if it is packed, its bin counts."""

    files: DatasetFiles
    index: Index
    counts: BinCounts | None = None

    def tokens(self, split: SplitName) -> int:
        """Count the tokens of a split, virtual ones included."""
        return self.index.split(split).tokens

    def pass_tokens(self, split: SplitName) -> int:
        """Count the tokens of one pass over a split, padding of packed samples included."""
        return self.tokens(split) if self.counts is None else self.counts.bins(split) * self.counts.seq_length


@dataclass(frozen=True)
class OpenedDatasets:
    """All datasets of a job, sorted by name, and the caches that the loaders of a process share.

    Attributes:
        chunks: cache of what is read from object stores; None only if all files are on disks.
    """

    datasets: tuple[OpenedDataset, ...]
    open_files: OpenFiles = field(default_factory=open_files)
    orders: OrderCache = field(default_factory=order_cache)
    bins: BinCache = field(default_factory=bin_cache)
    chunks: ChunkCache | None = None

    @property
    def training_tokens(self) -> int:
        """Tokens of one pass over the training split of all datasets, padding included."""
        return sum(dataset.pass_tokens("train") for dataset in self.datasets)

    @property
    def held_out_tokens(self) -> int:
        """Tokens of one pass over the held-out split of all datasets, padding included."""
        return sum(dataset.pass_tokens("held_out") for dataset in self.datasets)


def stored_samples(
    dataset: OpenedDataset, opened: OpenedDatasets, config: DataConfig, seed: int, split: SplitName, vocab_size: int
) -> Samples:
    """Return the samples of one split of a dataset."""
    files, index, counts = dataset.files, dataset.index, dataset.counts
    lengths, seq_length = index.split(split), config.seq_length
    key = (seed, text_key(files.name, split))
    fingerprint = {
        "files": files.digest,
        "file_count": len(files.paths),
        "content": index.content,
        "settings": index.header["settings"],
        "documents": len(index.documents),
        "tokens": lengths.tokens,
    }
    stream: TokenStream
    if counts is None:
        shards = cut_shards(lengths, shard_count(lengths.tokens, seq_length, config.logical_shards))
        order = SampleOrder(shards.tokens, seq_length, key)
        stream = TokenStream(lengths, shards, seq_length, key, opened.orders)
    else:
        bounds = counts.bounds[split]
        first_blocks = cut_blocks(bounds, config.logical_shards)
        # A sample is a whole bin, so the order counts bins as tokens, and one sample as one token.
        order = SampleOrder(np.diff(bounds[first_blocks]), 1, key)
        stream = PackedStream(
            lengths, bounds, first_blocks, seq_length, counts.packing, key, opened.orders, opened.bins
        )
        fingerprint["packing"] = counts.packing
    reader = DocumentReader(files, index, config, vocab_size, opened.open_files, opened.chunks)
    return Samples(
        files.name,
        stream.shards,
        fingerprint,
        order.samples,
        stream.spans,
        reader.read,
        order.samples_before_pass(1),
        index.header["changes"],
        reader.fetches if files.is_remote else None,
    )


def dummy_samples(seq_length: int, logical_shards: int, seed: int, split: str, vocab_size: int) -> Samples:
    """Return samples of consecutive tokens, modulo the vocabulary, that need no files.

    A sample counts upwards from a hash of its number. A model soon learns to count if labels are shifted correctly.
    """
    key = derive_key(Purpose.DUMMY, seed, text_key(split))

    def samples(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = np.arange(begin, end)
        return (hash64(key, numbers) % np.uint64(logical_shards)).astype(np.int64), numbers

    def spans(shards: np.ndarray, numbers: np.ndarray) -> Spans:
        rows = len(numbers)
        return Spans(numbers, np.zeros(rows, dtype=np.int64), np.full(rows, seq_length + 1), np.arange(rows + 1))

    def read(spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        first = (hash64(key, spans.documents) % np.uint64(vocab_size)).astype(np.int64)
        target[rows] = (np.arange(target.shape[1]) + first[:, None]) % vocab_size

    return Samples("dummy", logical_shards, {"dummy": True, "vocab_size": vocab_size}, samples, spans, read)
