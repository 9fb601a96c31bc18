"""A dataset of packed documents as a sequence of samples, each of them a bin.

    k --SampleOrder--> (shard, j) --PackedStream--> (pass, block, bin) --pack_block--> spans of documents
      --DocumentReader--> at most S + 1 tokens

A shard is a run of whole blocks. Each pass visits its blocks in a keyed order, and the bins of a block in a keyed
order: every bin once. What documents share a bin is the same in every pass. Only the bins before each block, which are
counted ahead, and the one block that a sample lies in are looked at, so that finding a sample costs the same in the
first pass and in the thousandth. Legend: S sequence length, e pass, j sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pretraining.data.recently_used import RecentlyUsed
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, keyed_order, text_key
from pretraining.data.sampling.packing import PackedBlock, pack_block
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import SAMPLES_A_SHARD, Lengths, OrderCache, Spans
from pretraining.data.storage.bin_counts import BinCounts
from pretraining.data.storage.dataset_files import DatasetFiles
from pretraining.data.storage.document_reader import DocumentReader
from pretraining.data.storage.index import Index


@dataclass(frozen=True)
class OrderedBins:
    """The bins of a block, and the order in which a pass takes them.

    Attributes:
        block: what is in them.
        order: [bins] int32.
    """

    block: PackedBlock
    order: np.ndarray


BinCache = RecentlyUsed[OrderedBins]


def bin_cache(limit_bytes: int = 64 * 2**20) -> BinCache:
    """A memory for packed blocks, to be shared by all the streams of a process."""
    return RecentlyUsed(limit_bytes, cost=lambda bins: bins.block.nbytes + bins.order.nbytes + 1024)


def cut_blocks(bounds: np.ndarray, logical_shards: int) -> np.ndarray:
    """Cut a dataset between blocks into shards of nearly equal bins; a shard may hold none where blocks are unequal.

    Of `total` bins, shard s of `count` starts with the first block whose first bin is at or after s * total / count.

    Args:
        bounds: [blocks + 1] int64, bins before each block, then all.
        logical_shards: how many shards to make at most; there are fewer where these would hold less than
            `SAMPLES_A_SHARD` bins, or no whole block.

    Returns:
        [shards + 1] int64, the first block of each shard, then the number of blocks.
    """
    total = int(bounds[-1])
    count = max(1, min(logical_shards, int(np.count_nonzero(np.diff(bounds))), total // SAMPLES_A_SHARD))
    targets = [-(-shard * total // count) for shard in range(1, count)]
    return np.array([0, *np.searchsorted(bounds, targets), len(bounds) - 1], dtype=np.int64)


class PackedStream:
    """Where the tokens of each sample are.

    Args:
        lengths: of the documents.
        bounds: [blocks + 1] int64, bins before each block, then all.
        first_blocks: [shards + 1] int64, the first block of each shard, then the number of blocks.
        seq_length: S.
        packing: how documents are packed.
        key: parts that make this dataset's orders its own: (seed, dataset).
        orders: memory for the orders of blocks, shared with other streams.
        cache: memory for packed blocks, shared with other streams.
    """

    def __init__(
        self,
        lengths: Lengths,
        bounds: np.ndarray,
        first_blocks: np.ndarray,
        seq_length: int,
        packing: str,
        key: tuple[int, int],
        orders: OrderCache,
        cache: BinCache,
    ) -> None:
        self._lengths = lengths
        self._bounds = bounds
        self._first_blocks = first_blocks
        self._seq_length = seq_length
        self._packing = packing
        self._key = key
        self._orders = orders
        self._cache = cache
        self.bins = np.diff(bounds[first_blocks])

    def spans(self, shards: np.ndarray, samples: np.ndarray) -> Spans:
        """The pieces of documents that make samples: at most S + 1 tokens each.

        Args:
            shards: [rows], numbers of shards that are not empty.
            samples: [rows], j of each sample, from 0, without end.
        """
        nothing = np.zeros(0, dtype=np.int64)
        documents, starts, lengths, first_spans = [nothing], [nothing], [nothing], [0]
        passes, positions = np.divmod(samples, self.bins[shards])
        for shard, pass_number, position in zip(shards.tolist(), passes.tolist(), positions.tolist(), strict=True):
            blocks, bounds = self._blocks(shard, pass_number)
            visit = int(bounds.searchsorted(position, "right")) - 1
            block = int(blocks[visit])
            bins = self._bins(shard, pass_number, block)
            pieces = bins.block.bin(int(bins.order[position - int(bounds[visit])]))
            documents.append(pieces[0] + block * self._lengths.block_documents)
            starts.append(pieces[1])
            lengths.append(pieces[2])
            first_spans.append(first_spans[-1] + len(pieces[0]))
        return Spans(
            np.concatenate(documents), np.concatenate(starts), np.concatenate(lengths), np.array(first_spans, np.int64)
        )

    def _blocks(self, shard: int, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of a shard in the order of a pass, [n], and the bins before each, [n + 1]."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            blocks = np.arange(self._first_blocks[shard], self._first_blocks[shard + 1])
            blocks = blocks[keyed_order(derive_key(Purpose.BLOCKS, *self._key, shard, pass_number), blocks)]
            bounds = np.concatenate(([0], np.cumsum(self._bounds[blocks + 1] - self._bounds[blocks])))
            return blocks, bounds

        return self._orders.get((self._identity, shard, pass_number), make)

    def _bins(self, shard: int, pass_number: int, block: int) -> OrderedBins:
        """The bins of a block, and their order in a pass."""

        def make() -> OrderedBins:
            begin = block * self._lengths.block_documents
            end = min(begin + self._lengths.block_documents, self._lengths.document_count)
            packed = pack_block(self._lengths.lengths(begin, end), self._seq_length, self._packing)
            bins = np.arange(self._bounds[block], self._bounds[block + 1])
            assert len(bins) == len(packed), "the counts are of other documents"
            order = keyed_order(derive_key(Purpose.BINS, *self._key, shard, pass_number), bins)
            return OrderedBins(packed, order.astype(np.int32))

        return self._cache.get((self._identity, shard, pass_number, block), make)

    @property
    def _identity(self) -> tuple[Any, ...]:
        """Keeps streams apart that share memory."""
        return (self._key, self._packing, self._seq_length, len(self._first_blocks))


class PackedSamples:
    """The bins of a dataset as samples.

    Args:
        files: the dataset.
        index: of these files.
        split: "train" or "held_out".
        reader: of the documents' tokens.
        counts: of the bins of its blocks.
        logical_shards: pieces that the dataset is cut into at most.
        seed: of all orders.
        orders: shared memory for the orders of blocks.
        cache: shared memory for packed blocks.
    """

    def __init__(
        self,
        files: DatasetFiles,
        index: Index,
        split: str,
        reader: DocumentReader,
        *,
        counts: BinCounts,
        logical_shards: int,
        seed: int,
        orders: OrderCache,
        cache: BinCache,
    ) -> None:
        self.name = files.name
        self._files = files
        self._index = index
        self._counts = counts
        self._reader = reader
        lengths, bounds = index.split(split), counts.bounds[split]
        self._tokens, self._bins = lengths.tokens, int(bounds[-1])
        first_blocks = cut_blocks(bounds, logical_shards)
        self.shards = len(first_blocks) - 1
        key = (seed, text_key(files.name, split))
        self._stream = PackedStream(
            lengths, bounds, first_blocks, counts.seq_length, counts.packing, key, orders, cache
        )
        # A sample is a whole bin: as a shard of so many tokens gives samples of one token.
        self._order = SampleOrder(self._stream.bins, 1, key)

    def fingerprint(self) -> dict[str, Any]:
        """What the samples are made from: files by names and sizes, settings of the index, packing, and totals."""
        return {
            "files": self._files.digest,
            "file_count": len(self._files.paths),
            "settings": self._index.header["settings"],
            "documents": len(self._index.documents),
            "tokens": self._tokens,
            "packing": self._counts.packing,
            "bins": self._bins,
        }

    def samples(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of samples [begin, end), and their numbers within it, both [end - begin] int64."""
        return self._order.samples(begin, end)

    def spans(self, shards: np.ndarray, numbers: np.ndarray) -> Spans:
        """The pieces of documents that make samples, one row each."""
        return self._stream.spans(shards, numbers)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        """Fill rows of a batch with samples, and with zeros behind them; see `DocumentReader.read`."""
        self._reader.read(spans, target, rows)
