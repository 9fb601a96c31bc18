"""Trillions of tokens and samples stay exact, beyond 32 bits and the 53 bits of a float."""

from __future__ import annotations

import numpy as np
import pytest
from tiers import first_quick
from unit.data.sampling.stream_oracle import BLOCKS, DOCUMENTS, key_of, keyed_hash

from pretraining.data.sampling.keyed_hash import text_key
from pretraining.data.sampling.sample_order import SampleOrder
from pretraining.data.sampling.token_stream import TokenStream, cut_shards, order_cache

SEQ_LENGTH, SHARDS, BLOCK = 8191, 1024, 1024
KEY = (2023, text_key("web", "train"))
PATTERN = 300 + np.arange(BLOCK) * 7919 % 2000
"""Tokens of each document of a block; all blocks are alike."""


class Repeated:
    """Lengths of three billion documents with 4.0 trillion tokens."""

    document_count, block_documents = 3_000_000 * BLOCK, BLOCK
    block_bounds = np.arange(3_000_001, dtype=np.int64) * int(PATTERN.sum())

    def lengths(self, begin: int, end: int) -> np.ndarray:
        return PATTERN[np.arange(begin, end) % BLOCK]


CUT = cut_shards(Repeated(), SHARDS)
ORDER = SampleOrder(CUT.tokens, SEQ_LENGTH, KEY)
STREAM = TokenStream(Repeated(), CUT, SEQ_LENGTH, KEY, order_cache(2**20), version=1)


def expected_documents(shard: int, number: int) -> tuple[int, list[tuple[int, int]]]:
    """The pass of a sample, and (document, first token) of its pieces in this pass, in Python integers."""
    begin, end = (int(bound) for bound in CUT.documents[shard : shard + 2])
    total = sum(int(PATTERN[document % BLOCK]) for document in range(begin, end))
    assert total == int(CUT.tokens[shard])
    pass_number, position = divmod(number * SEQ_LENGTH, total)
    block_key, document_key = (key_of(kind, *KEY, shard, pass_number) for kind in (BLOCKS, DOCUMENTS))
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


@pytest.mark.parametrize("sample", first_quick(64 * 10**9, 64 * 10**14, 0, 2**31, 2**38, quick=2))
def test_samples_are_exact_far_beyond_32_bits_of_samples_and_tokens(sample: int) -> None:
    shards, numbers = ORDER.samples(sample, sample + 1)
    # Shards differ by less than a document, so all are at about the same position.
    assert abs(int(numbers[0]) - sample / SHARDS) <= 2 + sample * 2300 / int(CUT.token_bounds[-1])
    pass_number, pieces = expected_documents(int(shards[0]), int(numbers[0]))
    assert abs(pass_number - sample * SEQ_LENGTH // int(CUT.token_bounds[-1])) <= 1
    spans = STREAM.spans(shards, numbers)
    found = list(zip(spans.documents.tolist(), spans.starts.tolist(), strict=True))
    assert found[: len(pieces)] == pieces and int(spans.lengths.sum()) == SEQ_LENGTH + 1
