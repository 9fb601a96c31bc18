"""Where the samples of a dataset come from: an endless sequence, each a pure function of its number.

    k --SampleOrder--> (shard, j) --TokenStream or PackedStream--> spans of documents --DocumentReader--> tokens

Finding and reading work on many samples at once: what Python does a call is shared by all the rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from pretraining.config.training import DataConfig
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, text_key
from pretraining.data.sampling.packing import BinCache, PackedStream, bin_cache, cut_blocks
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import (
    OrderCache,
    Spans,
    TokenStream,
    cut_shards,
    order_cache,
    shard_count,
)
from pretraining.data.storage.bin_counts import BinCounts
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.document_reader import DocumentReader, OpenFiles, open_files
from pretraining.data.storage.index import Index

SplitName = Literal["train", "held_out"]


class Samples(Protocol):
    """An endless sequence of samples, each a pure function of its number; `name` is that of its dataset."""

    name: str
    shards: int

    def fingerprint(self) -> dict[str, Any]:
        """Returns what is equal for two sequences only if their samples are, JSON-able."""

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shard of samples [begin, end), and their numbers within it, both [end - begin] int64."""

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """Returns the pieces of documents that make samples, one row each; a made-up sample is a document."""

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fills `rows` of a batch, [batch rows, S + 1], with samples, and with zeros behind them.

        Raises:
            DataError: a file cannot be read, or holds a token beyond the vocabulary.
        """


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset with its index, and the counts of its packed samples; None where documents are streamed."""

    files: DatasetFiles
    index: Index
    counts: BinCounts | None = None

    def tokens(self, split: SplitName) -> int:
        """Counts the tokens of a split, virtual ones included."""
        return self.index.split(split).tokens

    def pass_tokens(self, split: SplitName) -> int:
        """Returns what a pass over a split takes of a run: its tokens or, where packed, S for each sample."""
        return self.tokens(split) if self.counts is None else self.counts.bins(split) * self.counts.seq_length


@dataclass(frozen=True)
class OpenedDatasets:
    """All datasets of a job, sorted by name, and the memory that the loaders of a process share."""

    datasets: tuple[OpenedDataset, ...]
    open_files: OpenFiles = field(default_factory=open_files)
    orders: OrderCache = field(default_factory=order_cache)
    bins: BinCache = field(default_factory=bin_cache)

    @property
    def training_tokens(self) -> int:
        """Tokens of one pass over everything that is trained on, the padding of packed samples included."""
        return sum(dataset.pass_tokens("train") for dataset in self.datasets)

    @property
    def held_out_tokens(self) -> int:
        """Tokens of everything that is held out, the padding of packed samples included."""
        return sum(dataset.pass_tokens("held_out") for dataset in self.datasets)


class StoredSamples:
    """The samples of a split of one of the opened datasets."""

    def __init__(
        self,
        dataset: OpenedDataset,
        opened: OpenedDatasets,
        config: DataConfig,
        seed: int,
        split: SplitName,
        vocab_size: int,
    ) -> None:
        files, index, counts = dataset.files, dataset.index, dataset.counts
        seq_length, logical_shards = config.seq_length, config.logical_shards
        self.name = files.name
        self._reader = DocumentReader(files, index, config, vocab_size, opened.open_files)
        lengths = index.split(split)
        key = (seed, text_key(files.name, split))
        self._fingerprint: dict[str, Any] = {
            "files": files.digest,
            "file_count": len(files.paths),
            "settings": index.header["settings"],
            "documents": len(index.documents),
            "tokens": lengths.tokens,
        }
        self._stream: TokenStream
        if counts is None:
            shards = cut_shards(lengths, shard_count(lengths.tokens, seq_length, logical_shards))
            self.shards = len(shards)
            self._order = SampleOrder(shards.tokens, seq_length, key)
            self._stream = TokenStream(lengths, shards, seq_length, key, opened.orders)
        else:
            bounds = counts.bounds[split]
            first_blocks = cut_blocks(bounds, logical_shards)
            self.shards = len(first_blocks) - 1
            caches = (opened.orders, opened.bins)
            self._stream = PackedStream(lengths, bounds, first_blocks, seq_length, counts.packing, key, *caches)
            # A sample is a whole bin: as a shard of so many tokens gives samples of one token.
            self._order = SampleOrder(np.diff(bounds[first_blocks]), 1, key)
            self._fingerprint |= {"packing": counts.packing, "bins": int(bounds[-1])}

    def fingerprint(self) -> dict[str, Any]:
        """Returns files by names and sizes, settings of the index, packing, and totals."""
        return dict(self._fingerprint)

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Samples`."""
        return self._order.samples(begin, end)

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """See `Samples`."""
        return self._stream.spans(shards, numbers)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """See `Samples`."""
        self._reader.read(spans, target, rows)


class DummySamples:
    """Made-up samples of consecutive tokens, modulo the vocabulary: no files, the same loader.

    A sample counts upwards from a hash of its number, which a model soon learns if labels are shifted as they should
    be. Samples are dealt to `logical_shards`, so that batches are sorted as those of a dataset are.
    """

    name = "dummy"

    def __init__(self, seq_length: int, logical_shards: int, seed: int, split: str, vocab_size: int) -> None:
        self.shards = logical_shards
        self._seq_length = seq_length
        self._key = derive_key(Purpose.DUMMY, seed, text_key(split))
        self._vocab_size = vocab_size

    def fingerprint(self) -> dict[str, object]:
        """See `Samples`."""
        return {"dummy": True, "vocab_size": self._vocab_size}

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Samples`."""
        numbers = np.arange(begin, end)
        return (hash64(self._key, numbers) % np.uint64(self.shards)).astype(np.int64), numbers

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """See `Samples`."""
        rows = len(numbers)
        lengths = np.full(rows, self._seq_length + 1)
        return Spans(numbers, np.zeros(rows, dtype=np.int64), lengths, np.arange(rows + 1))

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """See `Samples`."""
        first = (hash64(self._key, spans.documents) % np.uint64(self._vocab_size)).astype(np.int64)
        target[rows] = (np.arange(target.shape[1]) + first[:, None]) % self._vocab_size
