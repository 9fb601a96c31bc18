from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.packing_oracle import Piece, pack

from pretraining.config.training import Packing
from pretraining.data.sampling.packing import PACKINGS, PackedBlock, pack_block

LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 12), st.integers(13, 30), st.integers(30, 100)), max_size=40
)
BLOCKS = given(LENGTHS, st.one_of(st.integers(1, 12), st.integers(12, 60)), st.sampled_from(PACKINGS))


def packed(lengths: list[int], seq_length: int, packing: Packing) -> PackedBlock:
    return pack_block(np.array(lengths, dtype=np.int64), seq_length, packing)


def bins_of(block: PackedBlock) -> list[list[Piece]]:
    bins = [block.bin(number) for number in range(len(block))]
    return [list(zip(*(array.tolist() for array in arrays), strict=True)) for arrays in bins]


@settings(max_examples=250)
@BLOCKS
@example([], 4, "best_fit")
@example([0, 0], 4, "first_fit")
@example([1] * 7, 1, "greedy")
@example([5, 5, 5], 4, "greedy")  # exactly a row each
@example([3, 9, 2], 4, "greedy")  # full pieces leave the bin of the item before open
@example([2, 6, 3], 4, "best_fit")  # the last token of the second document is the label of its only piece
@example([6, 4, 6, 4], 9, "best_fit")
def test_bins_are_those_of_the_oracle(lengths: list[int], seq_length: int, packing: Packing) -> None:
    assert bins_of(packed(lengths, seq_length, packing)) == pack(lengths, seq_length, packing)


def test_documents_of_billions_of_tokens_take_no_memory() -> None:
    block = packed([2**32, 5, 2**32 - 1], 2, "best_fit")
    assert block.nbytes < 1000
    assert len(block) == 2**32 + 1
    assert [array.tolist() for array in block.bin(2**31 - 1)] == [[0], [2**32 - 2], [2]]
    assert [array.tolist() for array in block.bin(2**32)] == [[2], [2**32 - 4], [3]]
