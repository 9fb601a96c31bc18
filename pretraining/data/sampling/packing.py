"""Packing: the bins of documents that become samples, and their order.

    lengths of a block --cut--> full pieces, one bin each
                       --cut--> short documents and rests of long ones --greedy | first_fit | best_fit--> shared bins

A bin becomes a sample, a row of S + 1 tokens of which the last is only a label. A document of at most S + 1 tokens is
never split. A longer document is cut into pieces of S + 1 tokens that overlap by one token, so every token except the
document's first is a label once. Its rest is packed like a short document.

Bins are numbered by their first items in canonical order: documents by number, pieces by position. The bins of a block
depend only on the block, so they are counted ahead (bin_counts.py) and made when needed: 1024 documents take about
half a millisecond. A change of an algorithm changes the samples of runs, and needs a new `ALGORITHM_VERSION`.

A shard is a range of whole blocks. Each pass visits its blocks, and the bins of a block, in a keyed order, which mixes
depths of documents. So a pass has no keyed place to begin at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pretraining.config.training import Packing
from pretraining.data.sampling.keyed_hash import Purpose, derive_key, keyed_order
from pretraining.data.sampling.token_stream import MIN_SHARD_SAMPLES, Lengths, OrderCache, Shards, Spans, TokenStream
from pretraining.data.threads import RecentlyUsed

ALGORITHM_VERSION = 1


@dataclass(frozen=True)
class PackedBlock:
    """The bins of a block, in compact form because thousands of blocks are in memory.

    Attributes:
        full_pieces: [documents + 1] int64, full pieces before each document, then in total.
        shared: [shared bins] int64, number of each shared bin among all bins; the other bins are full pieces.
        first_items: [shared bins + 1] int32, first item of each shared bin, then the number of items.
        documents: [items] int32, document of each item, counted from the block's first.
        lengths: [items] int32, tokens of each item: a whole document, or the rest after its full pieces.
    """

    seq_length: int
    full_pieces: np.ndarray
    shared: np.ndarray
    first_items: np.ndarray
    documents: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        """Return the number of bins."""
        return len(self.shared) + int(self.full_pieces[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        arrays = (self.full_pieces, self.shared, self.first_items, self.documents, self.lengths)
        return sum(array.nbytes for array in arrays)

    def bin(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a bin's pieces, [n] int64 each: document within the block, first token, and length."""
        place = int(np.searchsorted(self.shared, number))
        if place == len(self.shared) or self.shared[place] != number:
            piece = number - place  # among all full pieces: `place` shared bins come before it
            document = int(np.searchsorted(self.full_pieces, piece, side="right")) - 1
            start = (piece - int(self.full_pieces[document])) * self.seq_length
            return np.array([document]), np.array([start]), np.array([self.seq_length + 1])
        items = slice(self.first_items[place], self.first_items[place + 1])
        documents = self.documents[items].astype(np.int64)
        starts = (self.full_pieces[documents + 1] - self.full_pieces[documents]) * self.seq_length
        return documents, starts, self.lengths[items].astype(np.int64)


def pack_block(lengths: np.ndarray, seq_length: int, packing: Packing) -> PackedBlock:
    """Pack the documents of a block into bins of at most S + 1 tokens.

    Args:
        lengths: [documents] int64, tokens of each; empty documents are dropped.
        packing: "greedy" (next-fit) puts an item into the previous item's bin or a new one; "first_fit" into the first
            bin with room; "best_fit" (best-fit decreasing), longest items first, into the fullest bin with room.
    """
    full = np.maximum(lengths - 1, 0) // seq_length
    rests = lengths - full * seq_length
    rests[(full > 0) & (rests == 1)] = 0  # this token is the label of the last full piece
    full_pieces = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(full, out=full_pieces[1:])

    items = np.flatnonzero(rests)
    sizes = rests[items]
    bins = _ALGORITHMS[packing](sizes, seq_length + 1)
    first_items = np.zeros(int(bins.max(initial=-1)) + 2, dtype=np.int32)
    np.cumsum(np.bincount(bins), out=first_items[1:])
    order = np.argsort(bins, kind="stable")
    documents = items[order]
    # Before a shared bin come the earlier shared bins, and the full pieces of all documents up to its first item's
    # document (included).
    shared = np.arange(len(first_items) - 1) + full_pieces[documents[first_items[:-1]] + 1]
    return PackedBlock(
        seq_length, full_pieces, shared, first_items, documents.astype(np.int32), sizes[order].astype(np.int32)
    )


def _next_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each item, [items] int64; bins are numbered by their first items."""
    ends = [0, *np.cumsum(sizes).tolist()]
    firsts = [0]
    while firsts[-1] < len(sizes):
        first = firsts[-1]
        firsts.append(bisect_right(ends, ends[first] + capacity, first) - 1)
    return np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))


def _first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bins as `_next_fit` does. A binary tree with the most room below each node finds the first bin."""
    # A bin opens only if no earlier bin has room. So any two bins together exceed one bin's capacity, and at most one
    # bin is less than half full.
    most_bins = 2 * int(sizes.sum()) // capacity + 1
    leaves = 1 << (most_bins - 1).bit_length()
    rooms = [capacity] * (2 * leaves)  # the children of node n are 2n and 2n + 1
    bins = []
    for size in sizes.tolist():
        node = 1
        while node < leaves:
            node *= 2
            if rooms[node] < size:
                node += 1
        bins.append(node - leaves)
        rooms[node] = room = rooms[node] - size
        while node > 1:
            other = rooms[node ^ 1]
            if other > room:  # `max` would cost a third of the run time
                room = other
            node //= 2
            if rooms[node] == room:
                break
            rooms[node] = room
    return np.array(bins, dtype=np.int64)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bins as `_next_fit` does. Ties go to the earlier item, and to the bin that opened first."""
    count = len(sizes)
    bins = [0] * count
    opened = 0
    rooms: list[int] = []  # sorted; room * count + bin, for every bin
    by_size = np.argsort(-sizes, kind="stable")
    for item, size in zip(by_size.tolist(), (sizes[by_size] * count).tolist(), strict=True):
        place = bisect_left(rooms, size)
        if place < opened:
            room_and_bin = rooms.pop(place)
        else:
            room_and_bin = capacity * count + opened
            opened += 1
        bins[item] = room_and_bin % count
        insort(rooms, room_and_bin - size)
    in_order_of_opening = np.array(bins, dtype=np.int64)
    _, first_items = np.unique(in_order_of_opening, return_index=True)
    numbers = np.empty(opened, dtype=np.int64)
    numbers[np.argsort(first_items)] = np.arange(opened)
    return numbers[in_order_of_opening]


_ALGORITHMS: dict[Packing, Callable[[np.ndarray, int], np.ndarray]] = {
    "greedy": _next_fit,
    "first_fit": _first_fit,
    "best_fit": _best_fit_decreasing,
}


BinCache = RecentlyUsed[tuple[PackedBlock, np.ndarray]]
"""Bins of blocks, each with the order of the bins in a pass, [bins] int32."""


def bin_cache(limit_bytes: int = 64 * 2**20) -> BinCache:
    """Make a cache of packed blocks, shared by all streams of a process."""
    return RecentlyUsed(limit_bytes, cost=lambda bins: bins[0].nbytes + bins[1].nbytes + 1024)


def cut_blocks(bounds: np.ndarray, logical_shards: int) -> np.ndarray:
    """Cut a dataset between blocks into shards of nearly equal bins; return each shard's first block, then all blocks.

    Shard s of `count` starts at the first block whose first bin is at or after s * total / count. There are fewer than
    `logical_shards` shards if they would hold less than `MIN_SHARD_SAMPLES` bins or less than one block.

    Args:
        bounds: [blocks + 1] int64, bins before each block, then all.
    """
    total = int(bounds[-1])
    count = max(1, min(logical_shards, int(np.count_nonzero(np.diff(bounds))), total // MIN_SHARD_SAMPLES))
    targets = [-(-shard * total // count) for shard in range(1, count)]
    return np.array([0, *np.searchsorted(bounds, targets), len(bounds) - 1], dtype=np.int64)


class PackedStream(TokenStream):
    """A stream of bins, which cuts and orders shards of bins as `TokenStream` does shards of tokens.

    `bounds` and `first_blocks` are argument and result of `cut_blocks`; streams share `cache` and `orders`.
    """

    _has_places = False

    def __init__(
        self,
        lengths: Lengths,
        bounds: np.ndarray,
        first_blocks: np.ndarray,
        seq_length: int,
        packing: Packing,
        key: tuple[int, int],
        orders: OrderCache,
        cache: BinCache,
    ) -> None:
        shards = Shards(first_blocks * lengths.block_documents, bounds[first_blocks])
        super().__init__(lengths, shards, seq_length, key, orders)
        self._block_bounds, self._packing, self._cache = bounds, packing, cache
        self._identity = (*self._identity, packing, seq_length)
        self.bins = shards.tokens

    def spans(self, shards: np.ndarray, samples: np.ndarray) -> Spans:
        """Return the pieces of documents of samples, as `TokenStream.spans`, at most S + 1 tokens per row."""
        nothing = np.zeros(0, dtype=np.int64)
        documents, starts, lengths, first_spans = [nothing], [nothing], [nothing], [0]
        passes, positions = np.divmod(samples, self.bins[shards])
        for shard, pass_number, position in zip(shards.tolist(), passes.tolist(), positions.tolist(), strict=True):
            blocks, bounds = self._blocks(shard, pass_number)
            visit = int(bounds.searchsorted(position, "right")) - 1
            block = int(blocks[visit])
            packed, order = self._bins(shard, pass_number, block)
            pieces = packed.bin(int(order[position - int(bounds[visit])]))
            documents.append(pieces[0] + block * self._lengths.block_documents)
            starts.append(pieces[1])
            lengths.append(pieces[2])
            first_spans.append(first_spans[-1] + len(pieces[0]))
        return Spans(
            np.concatenate(documents), np.concatenate(starts), np.concatenate(lengths), np.array(first_spans, np.int64)
        )

    def _bins(self, shard: int, pass_number: int, block: int) -> tuple[PackedBlock, np.ndarray]:
        """Return the bins of a block, and their order in a pass."""

        def make() -> tuple[PackedBlock, np.ndarray]:
            begin = block * self._lengths.block_documents
            lengths = self._lengths.lengths(begin, begin + self._lengths.block_documents)
            packed = pack_block(lengths, self._seq_length, self._packing)
            bins = np.arange(self._block_bounds[block], self._block_bounds[block + 1])
            assert len(bins) == len(packed), "bin counts belong to other documents"
            order = keyed_order(derive_key(Purpose.BINS, *self._key, shard, pass_number), bins)
            return packed, order.astype(np.int32)

        return self._cache.get((self._identity, shard, pass_number, block), make)
