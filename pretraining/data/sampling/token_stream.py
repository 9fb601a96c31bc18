"""The token stream: a dataset in logical shards, each an endless stream of tokens with a new order in each pass.

    documents in canonical order --cut_shards--> shards of nearly equal tokens
    shard, pass e: blocks in a keyed order, the documents of each block in a keyed order --> T tokens, then pass e + 1
    sample j of a shard: its tokens [jS, (j + 1)S) and one more, the label of the last

Each pass begins at the shard's keyed place: a token inside a document, the same one in all passes.
It visits the document's block first, and in it this document first, from the place on. The part before the place comes
last, so a pass still has each token once, and the next pass continues the document: no text breaks off inside the
stream. The first sample of a shard begins inside a document, as most samples do, and a batch mixes depths of documents.
Positions, separators and begin tokens follow from the pieces.

Block totals and the lengths of a sample's own block are enough to find the sample, so the cost is the same in every
pass. Legend: S sequence length, T tokens of a shard, e pass, j sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pretraining.data.sampling.keyed_hash import Purpose, derive_key, hash64, keyed_order
from pretraining.data.threads import RecentlyUsed

MIN_SHARD_SAMPLES = 8
"""Minimum samples per shard; small datasets have fewer shards than `logical_shards`. A sample that is longer than its
shard would repeat the same few documents."""


class Lengths(Protocol):
    """Lengths of a dataset's documents. `block_bounds` are the tokens before each block, then all."""

    document_count: int
    block_documents: int
    block_bounds: np.ndarray

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens of documents [begin, end), int64; stop at the last document."""


@dataclass(frozen=True)
class Shards:
    """The shards of a dataset: documents and tokens before each shard, then all, [shards + 1] int64."""

    documents: np.ndarray
    token_bounds: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """T of every shard, [shards] int64."""
        return np.diff(self.token_bounds)

    def __len__(self) -> int:
        return len(self.documents) - 1


@dataclass(frozen=True)
class Spans:
    """Non-empty pieces of documents that form rows.

    Attributes:
        documents: [n] int64, canonical numbers.
        starts: [n] int64, first token of the piece within its document.
        lengths: [n] int64, tokens of the piece, virtual ones included.
        first_spans: [rows + 1] int64, first piece of each row, then n.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    first_spans: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Row of each piece, [n]."""
        return np.repeat(np.arange(len(self.first_spans) - 1), np.diff(self.first_spans))

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row, [rows]."""
        return np.diff(np.concatenate(([0], np.cumsum(self.lengths)))[self.first_spans])

    def positions(self, row_positions: np.ndarray) -> np.ndarray:
        """Return the first position of each piece, [n], for rows that begin at `row_positions`, [rows]."""
        ends = np.cumsum(self.lengths)
        before_row = np.concatenate(([0], ends))[self.first_spans[:-1]]
        begins: np.ndarray = ends - self.lengths + np.repeat(row_positions - before_row, np.diff(self.first_spans))
        return begins


_Part = tuple[np.ndarray, np.ndarray, int, int]
"""Documents end to end, the start of each (then the end of all), and the range [begin, end) of tokens to copy."""


@dataclass(frozen=True)
class _Place:
    """Token `start` of a document in a block."""

    block: int
    document: int
    start: int


OrderCache = RecentlyUsed[tuple[np.ndarray, np.ndarray]]


def order_cache(limit_bytes: int = 64 * 2**20) -> OrderCache:
    """Make a cache of the orders of blocks and documents, shared by all streams of a process."""
    return RecentlyUsed(limit_bytes, cost=lambda order: sum(array.nbytes for array in order) + 512)


def shard_count(tokens: int, seq_length: int, logical_shards: int) -> int:
    """Return the number of shards of a dataset."""
    return max(1, min(logical_shards, tokens // (MIN_SHARD_SAMPLES * seq_length)))


def cut_shards(lengths: Lengths, count: int) -> Shards:
    """Cut a dataset between documents into shards of nearly equal tokens; with few documents, some are empty.

    Shard s starts at the first document whose first token is at or after s * total / count.
    """
    bounds, total = lengths.block_bounds, int(lengths.block_bounds[-1])
    documents, tokens = [0], [0]
    for shard in range(1, count):
        target = -(-shard * total // count)
        block = max(int(np.searchsorted(bounds, target)) - 1, 0)
        first = block * lengths.block_documents
        sizes = lengths.lengths(first, first + lengths.block_documents)
        # [documents of the block + 1]: the last is the start of the next block.
        starts = np.concatenate(([0], np.cumsum(sizes))) + bounds[block]
        within = int(np.searchsorted(starts, target))
        documents.append(first + within)
        tokens.append(int(starts[within]))
    documents.append(lengths.document_count)
    tokens.append(total)
    return Shards(np.array(documents, dtype=np.int64), np.array(tokens, dtype=np.int64))


class TokenStream:
    """The stream that finds the tokens of each sample.

    Args:
        key: (seed, `text_key` of the dataset).
        orders: cache that streams share.
    """

    _has_places = True

    def __init__(
        self,
        lengths: Lengths,
        shards: Shards,
        seq_length: int,
        key: tuple[int, int],
        orders: OrderCache,
    ) -> None:
        self.shards = len(shards)
        self._lengths, self._shards, self._tokens = lengths, shards, shards.tokens
        self._block_bounds = lengths.block_bounds
        self._seq_length, self._key, self._orders = seq_length, key, orders
        self._places: dict[int, _Place] = {}
        self._identity: tuple[Any, ...] = (key, len(shards))  # separates streams in a shared cache

    def spans(self, shards: np.ndarray, samples: np.ndarray) -> Spans:
        """Return the pieces of samples of non-empty shards, both [rows]; each row has S + 1 tokens."""
        if not len(shards):
            nothing = np.zeros(0, dtype=np.int64)
            return Spans(nothing, nothing, nothing, np.zeros(1, dtype=np.int64))
        passes, positions = np.divmod(samples * self._seq_length, self._tokens[shards])
        parts: list[_Part] = []
        row_parts = [0]
        crosses = False
        for shard, pass_number, position in zip(shards.tolist(), passes.tolist(), positions.tolist(), strict=True):
            missing = self._seq_length + 1
            missing -= self._collect(shard, pass_number, position, missing, parts)
            while missing:
                crosses, pass_number = True, pass_number + 1
                missing -= self._collect(shard, pass_number, 0, missing, parts)
            row_parts.append(len(parts))
        spans = _cut(parts, row_parts)
        return _join(spans) if crosses else spans

    def _collect(self, shard: int, pass_number: int, position: int, count: int, parts: list[_Part]) -> int:
        """Append parts with tokens [position, position + count) of a pass, up to its end; return their tokens."""
        blocks, block_starts = self._blocks(shard, pass_number)
        visit = int(block_starts.searchsorted(position, "right")) - 1
        taken = left = min(count, int(block_starts[-1]) - position)
        while left:
            documents, starts = self._documents(shard, pass_number, int(blocks[visit]))
            begin = position - int(block_starts[visit])
            end = min(begin + left, int(starts[-1]))
            if end > begin:
                first = int(starts.searchsorted(begin, "right")) - 1
                last = int(starts.searchsorted(end, "left"))
                parts.append((documents[first:last], starts[first : last + 1], begin, end))
                position += end - begin
                left -= end - begin
            visit += 1
        return taken

    def _blocks(self, shard: int, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks that a pass visits, [n], and the tokens before each, then all, [n + 1].

        If the pass begins at a place, it visits the place's block first, without the tokens before the place, and last.
        So this block starts before 0.
        """

        def make() -> tuple[np.ndarray, np.ndarray]:
            begin, end = self._shards.documents[shard : shard + 2]
            low, high = self._shards.token_bounds[shard : shard + 2]
            size = self._lengths.block_documents
            first, last = begin // size, -(-end // size)
            # A shard may have only a part of its first and last block: clip their totals to the shard's tokens.
            totals = np.diff(np.clip(self._block_bounds[first : last + 1], low, high))
            blocks = np.arange(first, last)
            order = keyed_order(derive_key(Purpose.BLOCKS, *self._key, shard, pass_number), blocks)
            if not self._has_places:
                return blocks[order], _starts(totals[order])
            place = self._place(shard)
            order = np.roll(order, -int(np.flatnonzero(blocks[order] == place.block)[0]))
            starts = _starts(np.append(totals[order], place.start)) - place.start
            return np.append(blocks[order], place.block), starts

        return self._orders.get((self._identity, shard, pass_number), make)

    def _place(self, shard: int) -> _Place:
        """Return the place at which the passes of a shard begin."""
        if shard not in self._places:
            low, high = (int(bound) for bound in self._shards.token_bounds[shard : shard + 2])
            key = derive_key(Purpose.PLACES, *self._key)
            token = low + int(hash64(key, np.array([shard]))[0]) % (high - low)  # in canonical order
            block = int(self._block_bounds.searchsorted(token, "right")) - 1
            first = block * self._lengths.block_documents
            sizes = self._lengths.lengths(first, first + self._lengths.block_documents)
            starts = _starts(sizes) + int(self._block_bounds[block])
            within = int(starts.searchsorted(token, "right")) - 1
            self._places[shard] = _Place(block, first + within, token - int(starts[within]))
        return self._places[shard]

    def _documents(self, shard: int, pass_number: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's non-empty documents in the order of a pass, [n], and the tokens before each, [n + 1]."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            size = self._lengths.block_documents
            begin = max(block * size, int(self._shards.documents[shard]))
            end = min((block + 1) * size, int(self._shards.documents[shard + 1]))
            lengths = self._lengths.lengths(begin, end)
            documents = np.flatnonzero(lengths) + begin
            order = keyed_order(derive_key(Purpose.DOCUMENTS, *self._key, shard, pass_number), documents)
            if self._has_places and block == (place := self._place(shard)).block:
                order = np.roll(order, -int(np.flatnonzero(documents[order] == place.document)[0]))
            return documents[order], _starts(lengths[documents[order] - begin])

        return self._orders.get((self._identity, shard, pass_number, block), make)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Return the sum of lengths before each item, then of all: [n + 1] int64."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _cut(parts: list[_Part], row_parts: list[int]) -> Spans:
    """Cut the pieces of all rows out of their parts; `row_parts` counts the parts before each row, then all."""
    documents, all_bounds, begins, ends = zip(*parts, strict=True)
    counts = np.array([len(part) for part in documents])
    lows = np.concatenate([bounds[:-1] for bounds in all_bounds])
    highs = np.concatenate([bounds[1:] for bounds in all_bounds])
    starts = np.maximum(lows, np.repeat(begins, counts))
    lengths = np.minimum(highs, np.repeat(ends, counts)) - starts
    first_spans = np.concatenate(([0], np.cumsum(counts)))[row_parts]
    return Spans(np.concatenate(documents), starts - lows, lengths, first_spans)


def _join(spans: Spans) -> Spans:
    """Join pieces of a row that continue each other: a pass that begins inside a document continues the last piece."""
    continues = np.diff(spans.documents, prepend=-1) == 0
    continues[1:] &= spans.starts[1:] == spans.starts[:-1] + spans.lengths[:-1]
    continues[spans.first_spans[:-1]] = False
    kept = np.flatnonzero(~continues)
    lengths = np.add.reduceat(spans.lengths, kept)
    return Spans(spans.documents[kept], spans.starts[kept], lengths, np.searchsorted(kept, spans.first_spans))
