"""Trillions of tokens and samples stay exact, beyond 32 bits and the 53 bits of a float."""

from __future__ import annotations

import numpy as np
import pytest
from tiers import first_quick

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


# sample, its shard, its number there, the first documents, and the first token: as computed with Python's integers
MEASURED = [
    (64 * 10**9, 587, 62_500_000, [1_763_075_766, 1_763_075_213, 1_763_075_478], 1089),
    (64 * 10**14, 735, 6_249_999_172_090, [2_206_914_105, 2_206_914_150, 2_206_913_749], 1059),
    (0, 817, 0, [2_453_747_126, 2_453_746_781, 2_453_747_374], 411),
    (2**31, 933, 2_097_152, [2_800_730_415, 2_800_730_750, 2_800_730_237], 1185),
    (2**38, 494, 268_435_463, [1_483_976_164, 1_483_975_830, 1_483_975_888], 797),
]


@pytest.mark.parametrize(("sample", "shard", "number", "documents", "start"), first_quick(*MEASURED, quick=2))
def test_samples_far_beyond_32_bits_are_exact(
    sample: int, shard: int, number: int, documents: list[int], start: int
) -> None:
    cut = cut_shards(Repeated(), SHARDS)
    shards, numbers = SampleOrder(cut.tokens, SEQ_LENGTH, KEY).samples(sample, sample + 1)
    assert (shards.tolist(), numbers.tolist()) == ([shard], [number])
    spans = TokenStream(Repeated(), cut, SEQ_LENGTH, KEY, order_cache(2**20)).spans(shards, numbers)
    assert spans.documents[:3].tolist() == documents and spans.starts.tolist() == [start] + [0] * (
        len(spans.starts) - 1
    )
    assert spans.lengths[1:-1].tolist() == PATTERN[spans.documents[1:-1] % BLOCK].tolist()
    assert int(spans.lengths.sum()) == SEQ_LENGTH + 1
