from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit.data.sampling.packing_oracle import Piece, pack
from unit.data.sampling.test_token_stream import KnownLengths
from unit.data.token_files import opened, plan

from pretraining.config.fields import settings_of
from pretraining.config.training import IGNORED_LABEL, DataConfig, Packing, TrainConfig
from pretraining.data.dataset import build_loader
from pretraining.data.sampling.packing import PackedStream, bin_cache, cut_blocks, pack_block
from pretraining.data.sampling.token_stream import Spans, order_cache

KEY = (11, 22)
PACKINGS: tuple[Packing, ...] = ("greedy", "first_fit", "best_fit")
LENGTHS = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 12), st.integers(30, 80)), min_size=1, max_size=60
).filter(any)


def pieces(spans: Spans) -> list[list[Piece]]:
    columns = zip(*(array.tolist() for array in (spans.documents, spans.starts, spans.lengths)), strict=True)
    found, bounds = list(columns), spans.first_spans.tolist()
    return [found[begin:end] for begin, end in pairwise(bounds)]


def test_documents_of_billions_of_tokens_take_no_memory() -> None:
    block = pack_block(np.array([2**32, 5, 2**32 - 1]), 2, "best_fit")
    assert block.nbytes < 1000 and len(block) == 2**32 + 1
    assert [array.tolist() for array in block.bin(2**31 - 1)] == [[0], [2**32 - 2], [2]]
    assert [array.tolist() for array in block.bin(2**32)] == [[2], [2**32 - 4], [3]]


@settings(max_examples=100)
@given(LENGTHS, st.sampled_from([1, 2, 8, 60]), st.integers(1, 9), st.integers(1, 20), st.sampled_from(PACKINGS))
@example([5, 5, 5, 3, 9, 2, 2, 6, 3], 60, 1, 4, "greedy")  # exactly one row each, and pieces that leave a bin open
@example([2, 6, 3], 60, 1, 4, "best_fit")  # the last token of the second document is the label of its only piece
@example([80] * 8 + [1] * 16, 8, 9, 3, "greedy")  # shards without a block
@example([0, 0, 0, 0, 5, 0, 0, 0], 2, 4, 19, "best_fit")  # blocks without a bin
def test_every_pass_of_the_shards_is_the_bins_of_the_oracle_each_once(
    lengths: list[int], block: int, shards: int, seq_length: int, packing: Packing
) -> None:
    blocks = [np.array(lengths[begin : begin + block]) for begin in range(0, len(lengths), block)]
    bounds = np.cumsum([0, *(len(pack_block(each, seq_length, packing)) for each in blocks)])
    known, cut = KnownLengths(lengths, block), cut_blocks(bounds, shards)
    made = PackedStream(known, bounds, cut, seq_length, packing, KEY, order_cache(), bin_cache())
    expected = [
        [(number * block + document, start, length) for document, start, length in items]
        for number, part in enumerate(blocks)
        for items in pack(part.tolist(), seq_length, packing)
    ]
    assert len(made.bins) == max(1, min(shards, int((np.diff(bounds) > 0).sum()), len(expected) // 8))
    sizes = made.bins.tolist()
    assert sum(sizes) == len(expected)
    # A shard is whole blocks: it begins with the first block at or after its share of all bins.
    begins = [next(at for at in bounds if at * len(sizes) >= shard * len(expected)) for shard in range(len(sizes))]
    for shard, (begin, count) in enumerate(zip(begins, sizes, strict=True)):
        for number in range(3):
            order = pieces(made.spans(np.full(count, shard), np.arange(number * count, (number + 1) * count)))
            assert sorted(order) == expected[begin : begin + count]
            in_blocks = [items[0][0] // block for items in order]
            assert len(list(groupby(in_blocks))) == len(set(in_blocks))  # one block after another


@pytest.mark.parametrize("packing", PACKINGS)
def test_under_a_mask_all_but_a_documents_first_token_is_a_label_once(config: DataConfig, packing: Packing) -> None:
    config = replace(config, packing=packing, document_mask=True)
    datasets = opened(config)
    epoch = build_loader(datasets, config, plan(datasets.training_tokens // 24), 0, 7, 1000)
    (micro_batch,) = next(epoch).micro_batches
    labels = micro_batch.model_inputs().labels_BS
    lengths = np.concatenate([each.index.split("train").lengths(0, 1000) for each in datasets.datasets])
    assert int((labels != IGNORED_LABEL).sum()) == int(np.maximum(lengths - 1, 0).sum())


def test_the_setting_names_the_packings_that_there_are() -> None:
    assert settings_of(TrainConfig)["packing"].choices == ("stream", *PACKINGS)
