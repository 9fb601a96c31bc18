"""A slow and simple oracle of a dataset's samples: complete lists, and Python integers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BLOCKS, DOCUMENTS, ROUNDS, PLACES = 1, 2, 3, 8

Place = tuple[int, int]  # document, position in it


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def keyed_hash(key: int, item: int) -> int:
    return mix(key ^ mix((item + GOLDEN) & MASK))


def key_of(*parts: int) -> int:
    key = 0
    for part in parts:
        key = keyed_hash(key, part)
    return key


def as_trained(
    document: Sequence[int],
    sep_token: int | None,
    bos_token: int | None = None,
    strip_tokens: Collection[int] = (),
    min_length: int = 1,
) -> list[int]:
    """The trained tokens of a document."""
    tokens = list(document)
    while tokens and tokens[0] in strip_tokens:
        tokens.pop(0)
    while tokens and tokens[-1] in strip_tokens:
        tokens.pop()
    if not tokens or len(tokens) < min_length:
        return []
    before = [bos_token] if bos_token is not None and tokens[0] != bos_token else []
    return before + tokens + ([sep_token] if sep_token is not None and tokens[-1] != sep_token else [])


def begun_at(first: Any, items: list[Any]) -> list[Any]:
    """The items in their order around a circle."""
    place = items.index(first)
    return items[place:] + items[:place]


def in_rounds(firsts: list[list[int]], key: tuple[int, int]) -> list[tuple[int, int]]:
    """(shard, sample of the shard) in the order of passes, given the first sample of each shard in each pass."""
    order = []
    for number, (first, last) in enumerate(pairwise(firsts)):
        pass_key = key_of(ROUNDS, *key, number)
        for turn in range(max(end - begin for begin, end in zip(first, last, strict=True))):
            turn_key = keyed_hash(pass_key, turn)
            there = [shard for shard in range(len(first)) if first[shard] + turn < last[shard]]
            there.sort(key=lambda shard: keyed_hash(turn_key, shard))
            order += [(shard, first[shard] + turn) for shard in there]
    return order


@dataclass
class Oracle:
    """The samples of documents of given lengths."""

    lengths: Sequence[int]
    block: int
    shards: int
    seq_length: int
    key: tuple[int, int]

    def shard_documents(self) -> list[list[int]]:
        """A document belongs to the shard that the position of its first token falls into."""
        total = sum(self.lengths)
        shards: list[list[int]] = [[] for _ in range(self.shards)]
        before = 0
        for document, length in enumerate(self.lengths):
            if length:
                shards[before * self.shards // total].append(document)
            before += length
        return shards

    def one_pass(self, shard: int, number: int) -> list[Place]:
        """All tokens of a shard in the order of a pass."""
        documents = self.shard_documents()[shard]
        block_key, document_key = key_of(BLOCKS, *self.key, shard, number), key_of(DOCUMENTS, *self.key, shard, number)
        blocks = sorted(
            {document // self.block for document in documents}, key=lambda item: keyed_hash(block_key, item)
        )
        in_block = {
            block: sorted(
                (document for document in documents if document // self.block == block),
                key=lambda item: keyed_hash(document_key, item),
            )
            for block in blocks
        }
        if not documents:
            return []
        canonical = self.tokens_of(documents)
        first, start = canonical[keyed_hash(key_of(PLACES, *self.key), shard) % len(canonical)]
        blocks = begun_at(first // self.block, blocks)
        in_block[blocks[0]] = begun_at(first, in_block[blocks[0]])
        tokens = self.tokens_of(document for block in blocks for document in in_block[block])
        return begun_at((first, start), tokens)

    def tokens_of(self, documents: Iterable[int]) -> list[Place]:
        return [(document, position) for document in documents for position in range(self.lengths[document])]

    def shard_samples(self, shard: int, passes: int) -> list[list[Place]]:
        """The whole samples of a shard's first passes."""
        stream = [place for number in range(passes + 1) for place in self.one_pass(shard, number)]
        tokens = len(stream) // (passes + 1)
        return [
            stream[sample * self.seq_length : (sample + 1) * self.seq_length + 1]
            for sample in range(passes * tokens // self.seq_length)
        ]
