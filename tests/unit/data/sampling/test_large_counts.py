"""Trillions of tokens and of samples: all stays exact where 32 bits, and the 53 of a float, have long run out."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from tiers import first_quick
from unit.data.sampling.stream_oracle import BLOCKS, DOCUMENTS, key_of, keyed_hash
from unit.data.token_files import plan

from pretraining.config.training import DataConfig
from pretraining.data.batch_reader import BatchReader
from pretraining.data.samples import Samples
from pretraining.data.sampling.keyed_hash import text_key
from pretraining.data.sampling.mixture import Mixture, Phase
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import Spans, TokenStream, cut_shards, order_cache

SEQ_LENGTH, SHARDS, BLOCK, BATCH, SEED = 8191, 1024, 1024, 64, 2023
PATTERN = 300 + np.arange(BLOCK) * 7919 % 2000
"""Tokens of each document of a block; all blocks are alike."""


class Repeated:
    """Documents by the hundred million, of which only the lengths are known."""

    def __init__(self, blocks: int) -> None:
        self.document_count, self.block_documents = blocks * BLOCK, BLOCK
        self.block_bounds = np.arange(blocks + 1, dtype=np.int64) * int(PATTERN.sum())

    def lengths(self, begin: int, end: int) -> np.ndarray:
        return PATTERN[np.arange(begin, end) % BLOCK]


class Synthetic:
    """Samples of such documents. Tokens are not read: a row is filled with its documents' numbers, cut to 31 bits."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name, self.shards = name, SHARDS
        self.known = Repeated(blocks)
        self.cut = cut_shards(self.known, SHARDS)
        self.key = (SEED, text_key(name, "train"))
        self.order = SampleOrder(self.cut.tokens, SEQ_LENGTH, self.key)
        self.stream = TokenStream(self.known, self.cut, SEQ_LENGTH, self.key, order_cache(2**20))

    def samples(self) -> Samples:
        return Samples(self.name, self.shards, {}, self.order.samples, self.stream.spans, self.read)

    def read(self, spans: Spans, target: np.ndarray, rows: np.ndarray) -> None:
        target[rows] = np.repeat(spans.documents % 2**31, spans.lengths).reshape(len(rows), -1)


SOURCES = [Synthetic("code", 200_000), Synthetic("web", 3_000_000)]  # 0.27 and 4.0 trillion tokens
WEIGHTS = {"code": 3, "web": 10}


def expected_documents(source: Synthetic, shard: int, number: int) -> tuple[int, list[tuple[int, int]]]:
    """The pass of a sample, and (document, first token) of its pieces up to the pass's end, in Python's integers."""
    begin, end = (int(bound) for bound in source.cut.documents[shard : shard + 2])
    total = sum(int(PATTERN[document % BLOCK]) for document in range(begin, end))
    assert total == int(source.cut.tokens[shard])
    pass_number, position = divmod(number * SEQ_LENGTH, total)
    block_key, document_key = (key_of(kind, *source.key, shard, pass_number) for kind in (BLOCKS, DOCUMENTS))
    pieces, left = [], SEQ_LENGTH + 1
    for block in sorted(range(begin // BLOCK, -(-end // BLOCK)), key=lambda each: keyed_hash(block_key, each)):
        inside = range(max(begin, block * BLOCK), min(end, (block + 1) * BLOCK))
        size = sum(int(PATTERN[document % BLOCK]) for document in inside)
        if position >= size:
            position -= size
            continue
        for document in sorted(inside, key=lambda each: keyed_hash(document_key, each)):
            length = int(PATTERN[document % BLOCK])
            if position < length and left > 0:
                pieces.append((document, position))
                left -= length - position
            position = max(position - length, 0)
        if left <= 0:
            break
    return pass_number, pieces


@pytest.mark.parametrize("step", first_quick(10**9, 10**14, 0, 2**31 // BATCH, 2**32, quick=2))
def test_steps_are_exact_far_beyond_32_bits_of_samples_and_tokens(step: int) -> None:
    reader = BatchReader(
        [source.samples() for source in SOURCES],
        Mixture([Phase.first(BATCH, WEIGHTS)]),
        plan(BATCH),
        0,
        DataConfig(seq_length=SEQ_LENGTH, logical_shards=SHARDS),
        vocab_size=2**31,
    )
    slots = reader.slots(step)
    assert sorted(slots.samples.tolist()) == list(range(step * BATCH, (step + 1) * BATCH))
    given = reader.mixture.counts_before_step(step)
    for name, weight in WEIGHTS.items():
        assert abs(given[name] - Fraction(weight * step * BATCH, 13)) < 2
    for number, source in enumerate(SOURCES):
        tokens, samples = int(source.cut.tokens.sum()), given[source.name]
        its = np.flatnonzero(slots.datasets == number)
        # Shards are within a document of each other, so all of them are about as far.
        for sample in slots.numbers[its].tolist():
            assert abs(sample - samples / SHARDS) <= 2 + sample * 2300 * SHARDS / tokens
    row = int(np.argmax(slots.samples))
    source = SOURCES[int(slots.datasets[row])]
    pass_number, pieces = expected_documents(source, int(slots.shards[row]), int(slots.numbers[row]))
    assert pass_number >= step * BATCH * SEQ_LENGTH * 10 // 13 // int(SOURCES[1].cut.tokens.sum()) - 1
    spans = source.stream.spans(slots.shards[row : row + 1], slots.numbers[row : row + 1])
    found = list(zip(spans.documents.tolist(), spans.starts.tolist(), strict=True))
    assert found[: len(pieces)] == pieces and int(spans.lengths.sum()) == SEQ_LENGTH + 1
    read = reader.read(step).micro_batches[0].tokens_BT[row].tolist()
    assert read == np.repeat(spans.documents % 2**31, spans.lengths).tolist()
