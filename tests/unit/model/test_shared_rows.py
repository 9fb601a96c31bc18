"""Ranks that share rows attend to the same tokens as a rank with whole rows."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from emulated_varlen import emulated_varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_shape import TINY_SHAPE
from torch import Tensor
from torch._dynamo.utils import counters

from pretraining.config.training import IGNORED_LABEL
from pretraining.context import ContextGroup, SharedRows
from pretraining.data.batch import MicroBatch, ModelInputs
from pretraining.distributed.compile import compile_blocks, without_compiling
from pretraining.model import shared_rows
from pretraining.model.init import initialize_weights
from pretraining.model.kernels import document_attention
from pretraining.model.llama import Llama
from pretraining.model.shared_rows import PartialRows, kernel_inputs, locate_rows

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def group_of(rank: int, size: int, whole: Tensor | None = None, lost: Tensor | None = None) -> ContextGroup:
    """A group whose other ranks would add the rest of `whole`, and have not read the rows `lost`."""

    def gather(part: Tensor) -> Tensor:
        assert whole is not None
        chunks = group.chunks(whole.size(-3))
        assert torch.equal(part, torch.cat([whole[..., chunk, :, :] for chunk in chunks], -3))
        return whole

    def any_of(values: Tensor) -> Tensor:
        return values if lost is None else values | lost

    group = ContextGroup(rank, size, gather, any_of)
    return group


@st.composite
def documents(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """Ranks, tokens of a row, and lengths of documents in some rows."""
    size = draw(st.sampled_from([1, 2, 3, 4]))
    length = 2 * size * draw(st.integers(1, 5))
    lengths: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=6)))
        lengths += [end - begin for begin, end in zip([0, *cuts], [*cuts, length], strict=True)]
    return size, length, tuple(lengths)


@pytest.mark.parametrize("has_kernel", [False, True], ids=["a call per piece", "one call"])
@settings(max_examples=40)
@given(documents())
def test_attention_and_gradients_are_those_of_whole_rows(
    has_kernel: bool, case: tuple[int, int, tuple[int, ...]]
) -> None:
    size, length, lengths = case
    scale = None if has_kernel else 0.2  # the emulated kernel has no scale
    generator, rows = torch.Generator().manual_seed(0), sum(lengths) // length
    q = torch.randn(rows, length, HEADS, HEAD_DIM, generator=generator, requires_grad=True)
    kv = torch.randn(2, rows, length, KEY_HEADS, HEAD_DIM, generator=generator, requires_grad=True)
    weights = torch.randn(q.shape, generator=generator)
    expected = document_attention(q, kv[0], kv[1], lengths, scale)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, kv))
    found, total = torch.empty_like(expected), torch.zeros(())
    with pytest.MonkeyPatch.context() as patch, emulated_varlen() if has_kernel else nullcontext():
        patch.setattr(shared_rows, "MASKED_QUERIES", 3)  # so that pieces need several calls
        for rank in range(size):
            shared = SharedRows(group_of(rank, size, kv), length, lengths)
            chunks = shared.group.chunks(length)

            def part(whole: Tensor, chunks: tuple[slice, slice] = chunks) -> Tensor:
                return torch.cat([whole[..., chunk, :, :] for chunk in chunks], -3)

            reach = PartialRows(shared, kernel_inputs(shared)) if has_kernel else locate_rows(shared, q, HEAD_DIM)
            mixed = reach.attend(part(q), part(kv[0]), part(kv[1]), scale)
            total = total + (mixed * part(weights)).sum()
            for chunk, piece in zip(chunks, mixed.detach().chunk(2, 1), strict=True):
                found[:, chunk] = piece
        gradients = torch.autograd.grad(total, (q, kv))
    torch.testing.assert_close(found, expected)
    # Each rank's part of the gradient of keys and values; the ranks' sum is that of whole rows.
    for gradient, of_whole in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, of_whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_ranks_parts_are_the_rows_with_their_labels_and_positions(has_mask: bool) -> None:
    rows, length, size = 2, 12, 3
    tokens_BT = torch.arange(rows * (length + 1)).view(rows, length + 1).to(torch.uint16)
    starts = torch.tensor([0, 5, 13, 14, 20], dtype=torch.int32) if has_mask else None
    batch = MicroBatch(tokens_BT, document_starts=starts)
    whole = batch.model_inputs()
    positions = torch.arange(length).expand(rows, -1) if whole.positions_BS is None else whole.positions_BS
    parts = [replace(batch, group=group_of(rank, size)).model_inputs() for rank in range(size)]
    for rank, part in enumerate(parts):
        assert part.document_lengths is not None and part.positions_BS is not None
        chunks = group_of(rank, size).chunks(length)
        for found, of_whole in zip(
            (part.tokens_BS, part.labels_BS, part.positions_BS),
            (whole.tokens_BS, whole.labels_BS, positions),
            strict=True,
        ):
            assert torch.equal(found, torch.cat([of_whole[:, chunk] for chunk in chunks], 1))
        assert part.attention_span == whole.attention_span
        assert torch.equal(part.columns_S, torch.cat([whole.columns_S[chunk] for chunk in chunks]))
        assert sum(part.document_lengths) == part.tokens_BS.numel()
        # Pieces of this rank's tokens: a piece begins where positions do not go on.
        flat, ends = part.positions_BS.flatten(), list(accumulate(part.document_lengths))
        for begin, end in pairwise([0, *ends]):
            assert (flat[begin:end].diff() == 1).all()
    assert sum((part.labels_BS != IGNORED_LABEL).sum() for part in parts) == (whole.labels_BS != IGNORED_LABEL).sum()


def test_a_row_that_one_rank_cannot_read_has_no_labels_on_any() -> None:
    tokens_BT = torch.ones(3, 9, dtype=torch.uint16)
    is_lost, own = torch.tensor([False, True, False]), torch.tensor([True, False, False])
    inputs = MicroBatch(tokens_BT, unreadable_B=own, group=group_of(1, 2, lost=is_lost)).model_inputs()
    assert (inputs.labels_BS == IGNORED_LABEL).all(1).tolist() == [True, True, False]
    # Without a group, only the lengths of rows say so, as ever.
    assert (MicroBatch(tokens_BT, unreadable_B=own).model_inputs().labels_BS == 1).all()


@pytest.mark.thorough
def test_compiled_blocks_are_not_compiled_for_each_batch_of_other_documents() -> None:
    group, generator = ContextGroup(1, 2, lambda part: torch.cat([part] * 2, -3), lambda lost: lost), random.Random(0)
    model = Llama(TINY_SHAPE)
    initialize_weights(model, TINY_SHAPE, 0, torch.device("cpu"))
    counters.clear()
    compile_blocks(model.blocks)
    with emulated_varlen():
        for _ in range(6):
            cuts = sorted(generator.sample(range(1, 64), generator.randint(1, 9)))
            lengths = tuple(end - begin for begin, end in pairwise([0, *cuts, 64]))
            tokens = torch.randint(TINY_SHAPE.vocab_size, (1, 64))
            inputs = ModelInputs(tokens, tokens, None, lengths).part_of(group)
            compiled = model(*inputs).objective_sum
            compiled.backward()
            with without_compiling():
                torch.testing.assert_close(compiled, model(*inputs).objective_sum)
    assert counters["stats"]["unique_graphs"] <= 4
