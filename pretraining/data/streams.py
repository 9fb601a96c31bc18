"""A dataset as logical shards, and each shard as an endless stream of tokens in a new order each pass.

    documents in canonical order --cut_shards--> shards of nearly equal tokens
    shard, pass e: blocks in a keyed order, the documents of each block in a keyed order --> T tokens, then pass e + 1
    sample j of a shard: its tokens [jS, (j + 1)S) and one more, the label of the last

Nothing here reads a token: positions follow from lengths alone, and only from block totals and the lengths of the one
block that a sample lies in, so finding a sample costs the same in the first pass and in the thousandth. Legend: S
sequence length, T tokens of a shard, e pass, j sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pretraining.data.cache import RecentlyUsed
from pretraining.data.order import Purpose, derive_key, keyed_order

SAMPLES_A_SHARD = 8
"""A dataset is cut into fewer than `logical_shards` pieces where these would hold less than so many samples: a sample
longer than its shard would repeat the same few documents."""


class Lengths(Protocol):
    """What is known of a dataset's documents: how many tokens each has."""

    document_count: int
    block_documents: int
    block_bounds: np.ndarray

    def lengths(self, begin: int, end: int) -> np.ndarray:
        """Tokens of documents [begin, end), int64."""
        ...


@dataclass(frozen=True)
class Shards:
    """Contiguous pieces of a dataset, cut between documents.

    Attributes:
        documents: [shards + 1] int64, number of each shard's first document, then the number of documents.
        token_bounds: [shards + 1] int64, tokens before each shard, then all.
    """

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
    """Pieces of documents that follow each other in a sample; none is empty.

    Attributes:
        documents: [n] int64, canonical numbers.
        starts: [n] int64, first token of the piece within its document.
        lengths: [n] int64, tokens of the piece, a virtual separator included.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


OrderCache = RecentlyUsed[tuple[np.ndarray, np.ndarray]]


def order_cache(limit_bytes: int = 128 * 2**20) -> OrderCache:
    """A memory for the orders of blocks and documents, to be shared by all the streams of a process."""
    return RecentlyUsed(limit_bytes, cost=lambda order: sum(array.nbytes for array in order) + 512)


def shard_count(tokens: int, seq_length: int, logical_shards: int) -> int:
    """How many pieces a dataset of so many tokens is cut into."""
    return max(1, min(logical_shards, tokens // (SAMPLES_A_SHARD * seq_length)))


def cut_shards(lengths: Lengths, count: int) -> Shards:
    """Cut a dataset between documents into pieces of nearly equal tokens; pieces can be empty where documents are few.

    Of `total` tokens, shard s starts with the first document whose first token is at or after s * total / count.
    """
    bounds, total = lengths.block_bounds, int(lengths.block_bounds[-1])
    documents, tokens = [0], [0]
    for shard in range(1, count):
        target = -(-shard * total // count)
        block = max(int(np.searchsorted(bounds, target)) - 1, 0)
        first = block * lengths.block_documents
        sizes = lengths.lengths(first, min(first + lengths.block_documents, lengths.document_count))
        # starts [documents of the block + 1]: the last is the start of the next block.
        starts = np.concatenate(([0], np.cumsum(sizes))) + bounds[block]
        within = int(np.searchsorted(starts, target))
        documents.append(first + within)
        tokens.append(int(starts[within]))
    documents.append(lengths.document_count)
    tokens.append(total)
    return Shards(np.array(documents, dtype=np.int64), np.array(tokens, dtype=np.int64))


class TokenStream:
    """Where the tokens of each sample are.

    Args:
        lengths: of the documents.
        shards: how they are cut.
        seq_length: S.
        key: parts that make this dataset's orders its own: (seed, dataset).
        cache: memory for orders, shared with other streams over the same documents.
    """

    def __init__(
        self, lengths: Lengths, shards: Shards, seq_length: int, key: tuple[int, int], cache: OrderCache
    ) -> None:
        self._lengths = lengths
        self._shards = shards
        self._seq_length = seq_length
        self._key = key
        self._cache = cache

    def spans(self, shard: int, sample: int) -> Spans:
        """The pieces of documents that make sample `sample` of a shard: S + 1 tokens.

        Args:
            shard: number of a shard that is not empty.
            sample: j, from 0, without end.
        """
        tokens = int(self._shards.token_bounds[shard + 1] - self._shards.token_bounds[shard])
        pass_number, position = divmod(sample * self._seq_length, tokens)
        missing = self._seq_length + 1
        pieces: list[Spans] = []
        while missing:
            taken = min(missing, tokens - position)
            self._collect(shard, pass_number, position, taken, pieces)
            missing -= taken
            pass_number, position = pass_number + 1, 0
        if len(pieces) == 1:
            return pieces[0]
        return Spans(
            np.concatenate([piece.documents for piece in pieces]),
            np.concatenate([piece.starts for piece in pieces]),
            np.concatenate([piece.lengths for piece in pieces]),
        )

    def _collect(self, shard: int, pass_number: int, position: int, count: int, pieces: list[Spans]) -> None:
        """Append the spans of tokens [position, position + count) of a pass."""
        blocks, block_starts = self._blocks(shard, pass_number)
        visit = int(np.searchsorted(block_starts, position, side="right")) - 1
        while count:
            documents, starts = self._documents(shard, pass_number, int(blocks[visit]))
            begin = position - int(block_starts[visit])
            end = min(begin + count, int(starts[-1]))
            if end > begin:
                pieces.append(_cut(documents, starts, begin, end))
            count -= end - begin
            position += end - begin
            visit += 1

    def _blocks(self, shard: int, pass_number: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of a shard in the order of a pass, [n], and the tokens before each, [n + 1]."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            begin, end = self._shards.documents[shard : shard + 2]
            low, high = self._shards.token_bounds[shard : shard + 2]
            size = self._lengths.block_documents
            first, last = begin // size, -(-end // size)
            # A shard's first and last block may be cut; clipping to the shard's own tokens gives their totals too.
            totals = np.diff(np.clip(self._lengths.block_bounds[first : last + 1], low, high))
            blocks = np.arange(first, last)
            order = keyed_order(derive_key(Purpose.BLOCKS, *self._key, shard, pass_number), blocks)
            return blocks[order], _starts(totals[order])

        return self._cache.get((self._key, len(self._shards), shard, pass_number), make)

    def _documents(self, shard: int, pass_number: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a block in the order of a pass, [n], and the tokens of the block before each, [n + 1]."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            size = self._lengths.block_documents
            begin = max(block * size, int(self._shards.documents[shard]))
            end = min((block + 1) * size, int(self._shards.documents[shard + 1]))
            documents = np.arange(begin, end)
            order = keyed_order(derive_key(Purpose.DOCUMENTS, *self._key, shard, pass_number), documents)
            return documents[order], _starts(self._lengths.lengths(begin, end)[order])

        return self._cache.get((self._key, len(self._shards), shard, pass_number, block), make)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Sums of what comes before each place, then of all: [n + 1] int64."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _cut(documents: np.ndarray, starts: np.ndarray, begin: int, end: int) -> Spans:
    """The pieces that cover tokens [begin, end) of documents laid end to end."""
    first = int(np.searchsorted(starts, begin, side="right")) - 1
    last = int(np.searchsorted(starts, end, side="left"))
    low = starts[first:last]
    piece_starts = np.maximum(low, begin)
    lengths = np.minimum(starts[first + 1 : last + 1], end) - piece_starts
    piece_starts -= low
    filled = lengths > 0
    if filled.all():
        return Spans(documents[first:last], piece_starts, lengths)
    return Spans(documents[first:last][filled], piece_starts[filled], lengths[filled])
