"""Ranks that share rows attend to the same tokens as a rank with whole rows."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import chain, pairwise

import pytest
import torch
from emulated_varlen import emulated_varlen
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_shape import TINY_SHAPE
from torch import Tensor
from torch._dynamo.utils import counters
from unit.model.test_attention import Rows, equally_long_rows

from pretraining.context_group import ContextGroup, SharedRows
from pretraining.data.batch import ModelInputs
from pretraining.distributed.compile import compile_blocks, without_compiling
from pretraining.model import shared_rows
from pretraining.model.init import initialize_weights
from pretraining.model.kernels import document_attention
from pretraining.model.llama import Llama
from pretraining.model.shared_rows import PartialRows, kernel_inputs, locate_rows

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 8


def group_of(rank: int, size: int, whole: Tensor) -> ContextGroup:
    """Return a group whose other ranks would add the rest of `whole`."""

    def gather(part: Tensor) -> Tensor:
        chunks = group.chunks(whole.size(-3))
        assert torch.equal(part, torch.cat([whole[..., chunk, :, :] for chunk in chunks], -3))
        return whole

    group = ContextGroup(rank, size, gather, lambda lost: lost)
    return group


@pytest.mark.parametrize("has_kernel", [False, True], ids=["a call per piece", "one call"])
@settings(max_examples=40)
@given(st.sampled_from([1, 2, 3, 4]).flatmap(lambda size: st.tuples(st.just(size), equally_long_rows(2 * size))))
def test_attention_and_gradients_are_those_of_whole_rows(has_kernel: bool, case: tuple[int, Rows]) -> None:
    size, documents = case
    rows, length, lengths = len(documents), sum(documents[0]), tuple(chain(*documents))
    scale = None if has_kernel else 0.2  # the emulated kernel has no scale
    generator = torch.Generator().manual_seed(0)
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
