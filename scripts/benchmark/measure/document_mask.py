"""What keeping attention inside documents costs: the project's way against others, on one layer's attention.

    python -m scripts.benchmark.measure.document_mask
    python -m scripts.benchmark.measure.document_mask --heads=12 --rounds=20

Forward and backward of attention over rows of documents whose lengths are log-normal. In each round every contender
computes once, and ratios are taken within rounds, so that a machine that is slow for a while is slow for all.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pretraining.model.attention import causal_attention, document_attention, locate_documents
from scripts.benchmark.common import Number, Table, announce, device, flag_parser, in_turn, synchronize

ROWS_ON_CPU = ((1, 4096), (8, 256))  # B, S
ROWS_ON_GPU = ((8, 4096), (2, 16384))
MEAN_LENGTHS = (60, 600)
HEAD_DIM = 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw_lengths(rows: int, length: int, mean: int) -> tuple[int, ...]:
    """Lengths of the documents that fill rows; the last of a row is cut at its end."""
    generator = np.random.default_rng(0)
    lengths = []
    for _ in range(rows):
        left = length
        while left:
            drawn = int(generator.lognormal(np.log(mean) - 0.5, 1.0))
            lengths.append(min(left, max(1, drawn)))
            left -= lengths[-1]
    return tuple(lengths)


def with_dense_mask(lengths: tuple[int, ...], rows: int) -> Attend:
    """A mask of all pairs of a row's tokens."""
    documents_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1)
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    mask_B1SS = (same_BSS & torch.ones_like(same_BSS[0]).tril())[:, None].to(device())

    def attend(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSHE, v_BSHE))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1SS).transpose(1, 2)

    return attend


def with_flex_attention(lengths: tuple[int, ...], rows: int) -> Attend:
    """FlexAttention, compiled, with a mask of blocks; it has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents_BS = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(rows, -1).to(device())

    def same_document(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BS[batch, query] == documents_BS[batch, key])

    length = documents_BS.size(1)
    mask = create_block_mask(same_document, rows, None, length, length, device=str(device()))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSHE, v_BSHE))
        mixed: Tensor = compiled(q, k, v, block_mask=mask)
        return mixed.transpose(1, 2)

    return attend


def seconds_of(attend: Attend, inputs: list[Tensor], gradient: Tensor) -> float:
    """Forward and backward once."""
    synchronize()
    began = time.perf_counter()
    torch.autograd.grad(attend(*inputs), inputs, gradient)
    synchronize()
    return time.perf_counter() - began


def measure(rows: int, length: int, mean: int, heads: int, dtype: torch.dtype, rounds: int) -> tuple[str, ...]:
    """A line of the table: milliseconds of the project's way, and how many times as long the others take."""
    lengths = draw_lengths(rows, length, mean)
    *inputs, gradient = (torch.randn(rows, length, heads, HEAD_DIM, device=device(), dtype=dtype) for _ in range(4))
    inputs = [each.requires_grad_() for each in inputs]
    documents = locate_documents(lengths, inputs[0], HEAD_DIM)
    assert documents is not None
    contenders: list[Attend] = [
        lambda q, k, v: document_attention(q, k, v, documents),
        causal_attention,
        with_dense_mask(lengths, rows),
    ]
    if torch.cuda.is_available():
        contenders.append(with_flex_attention(lengths, rows))
    expected = contenders[2](*inputs)
    for attend in (contenders[0], *contenders[3:]):
        torch.testing.assert_close(attend(*inputs), expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)
    turns = [[seconds_of(attend, inputs, gradient) for attend in contenders] for _ in range(rounds + 1)][1:]
    ratios = (statistics.median(turn[other] / turn[0] for turn in turns) for other in range(1, len(contenders)))
    own = statistics.median(turn[0] for turn in turns)
    name = f"{rows} x {length}, mean {mean}: {len(lengths)} documents, {str(dtype).removeprefix('torch.')}"
    return (name, f"{1000 * own:.1f} ms", *(f"{ratio:.1f}x" for ratio in ratios))


if __name__ == "__main__":
    flags = flag_parser(
        "Attention inside documents: the project's way against others.",
        rounds=Number(10, "rounds that count"),
        heads=Number(4, f"heads of {HEAD_DIM}"),
    ).parse_args()
    announce(flags)
    on_gpu = torch.cuda.is_available()
    # The kernel that takes all documents at once is for a GPU and bfloat16.
    dtypes = (torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16)
    cases = list(itertools.product(dtypes, ROWS_ON_GPU if on_gpu else ROWS_ON_CPU, MEAN_LENGTHS))
    others = ["whole rows", "dense mask", *(["FlexAttention"] if on_gpu else [])]
    table = Table("rows, documents", "the project's way", *others)
    for dtype, rows, mean in in_turn(cases):
        table.add(*measure(*rows, mean, flags.heads, dtype, flags.rounds))
    table.print()
