from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.data.packed_rows import Row, pack, packed_rows

from pretraining.config.training import IGNORED_LABEL
from pretraining.data.batch import MicroBatch


def expected_labels(width: int, rows: list[Row], document_mask: bool) -> list[list[int]]:
    labels = []
    for number, row in enumerate(rows):
        document_of = [document for document, length in enumerate(row) for _ in range(length)]
        labels.append([IGNORED_LABEL] * (width - 1))
        for place in range(1, len(document_of)):
            if not document_mask or document_of[place] == document_of[place - 1]:
                labels[number][place - 1] = number * width + place + 1
    return labels


@settings(max_examples=60)
@given(packed_rows(), st.booleans())
def test_labels_are_the_next_tokens_of_row_or_document(batch: tuple[int, list[Row]], document_mask: bool) -> None:
    width, rows = batch
    made = pack(width, rows, document_mask)
    inputs = made.model_inputs()
    assert inputs.tokens_BS.tolist() == made.tokens_BT[:, :-1].tolist()
    assert inputs.labels_BS.tolist() == expected_labels(width, rows, document_mask)


@settings(max_examples=60)
@given(packed_rows())
def test_positions_and_lengths_are_those_of_the_pieces_and_of_padding(batch: tuple[int, list[Row]]) -> None:
    width, rows = batch
    inputs = pack(width, rows).model_inputs()
    positions, lengths = [], []
    for row in rows:
        pieces = [*row, width - sum(row)]
        positions.append([place for length in pieces for place in range(length)][: width - 1])
        pieces[-1 if pieces[-1] else -2] -= 1  # the row's last token is only a label
        lengths += [length for length in pieces if length]
    assert inputs.positions_BS is not None and inputs.positions_BS.tolist() == positions
    assert inputs.document_lengths == tuple(lengths) and sum(lengths) == inputs.tokens_BS.numel()
    assert inputs.attention_span == pytest.approx(sum(length**2 for length in lengths) / sum(lengths))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_narrow_tokens_become_int64(dtype: torch.dtype) -> None:
    batch = MicroBatch(torch.tensor([[1, 2, 3], [4, 65_535, 6]], dtype=dtype), document_starts=torch.tensor([0, 1, 3]))
    inputs = batch.model_inputs()
    assert inputs.tokens_BS.tolist() == [[1, 2], [4, 65_535]]
    assert inputs.labels_BS.tolist() == [[IGNORED_LABEL, 3], [65_535, 6]]
    assert inputs.positions_BS is not None and inputs.positions_BS.tolist() == [[0, 0], [0, 1]]
    for tensor in (inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


def test_inputs_are_made_where_the_tokens_are_without_a_look_at_them() -> None:
    """The meta device has no values, so reading one fails here; on a GPU it would wait."""
    moved = pack(6, [[2, 4], [3]]).to("meta", non_blocking=True)
    inputs = moved.model_inputs()
    assert inputs.positions_BS is not None
    assert all(tensor.is_meta for tensor in (inputs.tokens_BS, inputs.labels_BS, inputs.positions_BS))
    assert inputs.document_lengths == (2, 3, 3, 2)
