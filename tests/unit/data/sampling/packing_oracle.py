"""A slow and simple oracle of packing: bins are lists, and each item checks every bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unit.data.sampling.stream_oracle import BLOCKS, key_of, keyed_hash

from pretraining.config.training import Packing

BINS = 6

Piece = tuple[int, int, int]  # document, first token, tokens


def pieces_of(document: int, length: int, seq_length: int) -> list[Piece]:
    """A document as one item, or cut into items that overlap by one token."""
    if length <= seq_length + 1:
        return [(document, 0, length)] if length else []
    starts = range(0, length - 1, seq_length)  # a piece without a label is dropped
    return [(document, start, min(seq_length + 1, length - start)) for start in starts]


def pack(lengths: Sequence[int], seq_length: int, packing: Packing) -> list[list[Piece]]:
    """The bins of a block in order, each with its items in order."""
    capacity = seq_length + 1
    items = [piece for document, length in enumerate(lengths) for piece in pieces_of(document, length, seq_length)]
    bins = [[item] for item in items if item[2] == capacity]
    partial = [item for item in items if item[2] < capacity]
    if packing == "best_fit":
        partial.sort(key=lambda item: -item[2])
    shared: list[list[Piece]] = []
    for item in partial:
        rooms = [capacity - sum(size for _, _, size in items) for items in shared]
        fitting = [number for number, room in enumerate(rooms) if room >= item[2]]
        if packing == "greedy":
            fitting = [number for number in fitting if number == len(shared) - 1]
        if packing == "best_fit":
            fitting.sort(key=lambda number: rooms[number])
        if fitting:
            shared[fitting[0]].append(item)
        else:
            shared.append([item])
    return sorted(sorted(items) for items in bins + shared)


@dataclass
class PackedOracle:
    """The samples of documents of given lengths, packed."""

    lengths: Sequence[int]
    block: int
    logical_shards: int
    seq_length: int
    packing: Packing
    key: tuple[int, int]

    @cached_property
    def blocks(self) -> list[list[list[Piece]]]:
        """The bins of every block, documents by their numbers in the dataset."""
        return [
            [
                [(first + document, start, length) for document, start, length in items]
                for items in pack(self.lengths[first : first + self.block], self.seq_length, self.packing)
            ]
            for first in range(0, len(self.lengths), self.block)
        ]

    def shard_blocks(self) -> list[list[int]]:
        """A shard starts at the first block whose first bin is at or after its share of all bins."""
        counts = [len(bins) for bins in self.blocks]
        before = [sum(counts[:block]) for block in range(len(counts))]
        shards = max(1, min(self.logical_shards, sum(map(bool, counts)), sum(counts) // 8))
        found: list[list[int]] = [[] for _ in range(shards)]
        for block in range(len(counts)):
            found[max(s for s in range(shards) if before[block] * shards >= s * sum(counts))].append(block)
        return found

    def one_pass(self, shard: int, number: int) -> list[list[Piece]]:
        """The bins of a shard in the order of a pass."""
        before = [sum(map(len, self.blocks[:block])) for block in range(len(self.blocks))]
        block_key, bin_key = (key_of(purpose, *self.key, shard, number) for purpose in (BLOCKS, BINS))
        return [
            self.blocks[block][bin_ - before[block]]
            for block in sorted(self.shard_blocks()[shard], key=lambda block: keyed_hash(block_key, block))
            for bin_ in sorted(
                range(before[block], before[block] + len(self.blocks[block])),
                key=lambda bin_: keyed_hash(bin_key, bin_),
            )
        ]
