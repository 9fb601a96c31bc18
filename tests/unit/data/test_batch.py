from __future__ import annotations

import pytest
import torch

from pretraining.data.batch import IGNORED_LABEL, MicroBatch


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_labels_are_the_tokens_shifted_by_one(dtype: torch.dtype) -> None:
    tokens_BS, labels_BS = MicroBatch(torch.tensor([[1, 2, 3], [4, 65_535, 6]], dtype=dtype)).inputs_and_labels()
    assert tokens_BS.tolist() == [[1, 2], [4, 65_535]] and labels_BS.tolist() == [[2, 3], [65_535, 6]]
    for tensor in (tokens_BS, labels_BS):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_labels_of_padding_are_ignored() -> None:
    lengths = torch.tensor([5, 3, 1, 0], dtype=torch.int32)
    _, labels_BS = MicroBatch(torch.ones(4, 5, dtype=torch.int32), lengths).inputs_and_labels()
    assert (labels_BS == IGNORED_LABEL).sum(dim=1).tolist() == [0, 2, 4, 4]


def test_a_batch_moves_with_its_padding() -> None:
    moved = MicroBatch(torch.ones(2, 3, dtype=torch.uint16), torch.tensor([3, 0])).to("meta", non_blocking=True)
    assert moved.tokens_BT.device.type == "meta" and moved.lengths_B is not None
