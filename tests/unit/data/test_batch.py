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


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_labels_of_padding_are_ignored(padding: int) -> None:
    _, labels_BS = MicroBatch(torch.ones(3, 5, dtype=torch.int32), padding).inputs_and_labels()
    assert (labels_BS == IGNORED_LABEL).sum(dim=1).tolist() == [0] * (3 - padding) + [4] * padding


def test_a_batch_moves_with_its_padding() -> None:
    moved = MicroBatch(torch.ones(2, 3, dtype=torch.uint16), 1).to("meta", non_blocking=True)
    assert moved.tokens_BT.device.type == "meta" and moved.padding == 1
